"""Rewards from the joint space of images and texts (CLIP); those with the same model share an image's embedding.

- ``clip_score``: how well the image fits its prompt.
- ``aesthetic``: how people would rate the image, whatever the prompt.
- ``clip``: which network the settings mean, how images are prepared for it, where its weights are.
- ``clip_model``: the network, its weights, and the embeddings of images and texts.
"""
