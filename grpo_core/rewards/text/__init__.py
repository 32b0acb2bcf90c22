"""Rewards of texts.

- ``answer``: the answer that stands beside the prompt.
- ``format``: the form that a completion must have.
- ``box_iou``: boxes against those beside the prompt; ``boxes`` reads and matches them.
"""
