"""`grpo export`: a stored policy version as a folder that diffusers, transformers and peft load.

plan        checks the options against the run, before anything is written
export      writes the folder, complete or not at all, with adapters as peft and diffusers load them, and pushes it
evaluated   how the version was evaluated and verified: evaluation.json, and their parts of README.md
model_card  its README.md: base, data, rewards, evaluation, verification
usage       the lines of Python that draw or answer with it
card_request   the card of an exported folder as a configuration, once it is trusted
folder      an exported folder as a model that is sampled
"""
