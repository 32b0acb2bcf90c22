"""Rewards that ask a model how much people would like a sample, or how well it follows its prompt.

- ``pickscore``, ``hpsv2``: models of which of two images people prefer for a prompt; ``preference`` is what they share.
- ``judge``: a language model behind an endpoint is prompted.
- ``reward_model``: a sequence classifier for texts.
"""
