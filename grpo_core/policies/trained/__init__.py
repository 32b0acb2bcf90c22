"""The trained part of a model, how it is saved, and its reference: LoRA, or full weights.

choice         the settings that select what is trained
stored_adapter the settings of an adapter that training starts from
model          the interface of a trained model, copies of its parameters, gradient checkpointing
lora_and_full  adapters, full weights, or nothing
merged         adapters added to the weights while sampling
whole          a model or pipeline with trained weights, as transformers and diffusers load it
component      the half of a policy's component that its trained model implements; 16-bit arithmetic
"""
