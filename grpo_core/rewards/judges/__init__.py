"""Rewards that ask a model how much people would like a sample, or how well it follows its prompt.

- ``preference``: pickscore and hpsv2, models of which of two images people prefer for a prompt.
- ``judge``: a language model behind an endpoint: what it is asked, and how its answer is read.
- ``reward_model``: a sequence classifier for texts.
"""
