"""`grpo export`: a stored policy version as a folder that diffusers, transformers and peft load.

plan        checks the options against the run, before anything is written
export      writes the folder, complete or not at all, with adapters as peft and diffusers load them, and pushes it
difference  how far a merged model is from a policy with a quantized base
model_card  its README.md, and the lines of Python that draw or answer with it
"""
