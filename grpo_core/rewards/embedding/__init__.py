"""Rewards from the joint space of pictures and texts (CLIP); those with the same model share a picture's embedding.

- ``clip_architecture``: which network a setting means, how pictures are prepared for it, where its weights are.
- ``clip_model``: the network, its weights, and the embeddings of pictures and texts.
- ``clip_settings``: the settings that the rewards here have in common, and their checks.
- ``clip_score``: how well the picture fits its prompt.
- ``aesthetic``: how people would rate the picture, whatever the prompt.
"""
