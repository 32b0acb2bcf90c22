"""What an image looks like, whatever it shows: rewards, and guardrails of other rewards.

- ``jpeg``: how well it compresses.
- ``edge_density``, ``sharpness``, ``colour_entropy``: edges, fine detail, colours.
- ``diversity``: how different it is from its siblings.
"""
