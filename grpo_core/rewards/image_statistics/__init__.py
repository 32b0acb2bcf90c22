"""What an image looks like, whatever it shows; rewards of their own, and guardrails of others.

- ``jpeg``: how well it compresses.
- ``edge_density``, ``sharpness``, ``colour_entropy``: edges, fine detail, colours.
- ``diversity``: how far it is from its siblings; ``distances`` measures that.
"""
