"""Rewards that ask a model how much people would like an image, or how well it does what was asked.

- ``preference``: PickScore and HPSv2, models of which of two images people prefer for a prompt.
- ``preference_scorers``: these models, built from checked weights.
- ``judge``, ``rubric``: a model behind an endpoint is asked in words.
- ``reward_model``: a sequence classifier for texts.
"""
