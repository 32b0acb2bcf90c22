"""`grpo export`: a stored policy version as a folder that diffusers, transformers and peft load.

plan        checks the options against the run, before anything is written
adapters    writes stored adapters as peft and diffusers load them
export      writes the folder, complete or not at all, and pushes it to the hub
model_card  its README.md: what it was trained from and on, held-out rewards, how it is used
usage       the lines of Python that draw or answer with it
"""
