"""Rewards of texts.

- ``answer``: the answer given with the prompt.
- ``format``: the required form of a completion.
- ``box_iou``: boxes against those given with the prompt.
"""
