"""What an image looks like, whatever it shows: rewards, and guardrails of other rewards.

- ``statistics``: of single images: how well it compresses, edges, fine detail, colours.
- ``diversity``: how different it is from its siblings.
"""
