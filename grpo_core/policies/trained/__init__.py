"""The trained part of a model, how it is saved, and copies of its weights: LoRA, or full weights.

settings          what is trained, and the settings of a stored adapter that training starts from
model             the interface of a trained model, copies of its parameters, gradient checkpointing
lora_and_full     adapters, full weights, or nothing
adapter_products  adapters over a base in bfloat16, multiplied in bfloat16 on a GPU
whole             a model or pipeline with trained weights, as transformers and diffusers load it
quantization      frozen networks in 4 bits under adapters
offload           frozen weights off the device while other components work
component         the half of a policy's component that its trained model implements; merged sampling, 16 bits
"""
