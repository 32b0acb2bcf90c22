"""`grpo export`: a stored policy version as a folder that diffusers, transformers and peft load.

plan        checks the options against the run, before anything is written
export      writes the folder, complete or not at all, with adapters as peft and diffusers load them, and pushes it
model_card  its README.md: base, data, rewards, held-out rewards before and after
usage       the lines of Python that draw or answer with it
"""
