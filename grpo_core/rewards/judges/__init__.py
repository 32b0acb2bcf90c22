"""Rewards that ask a model how much people would like a sample, or how well it does what was asked.

- ``pickscore``, ``hpsv2``: models of which of two images people prefer for a prompt; ``preference`` is what they share.
- ``judge``: a language model behind an endpoint is asked in words.
- ``reward_model``: a sequence classifier for texts.
"""
