"""Rewards that ask a model how much people would like a sample, or how well it follows its prompt.

- ``preference``: pickscore and hpsv2, models of which of two images people prefer for a prompt.
- ``judge``: a language model behind an endpoint is prompted.
- ``reward_model``: a sequence classifier for texts.
"""
