"""Weights that a reward comes from: a local path or a name on the Hugging Face Hub, checked before anything loads.

- ``source``: where files or models are, what is wrong with them, their digests, and downloads.
- ``load``: their tensors, models and tokenizers.
"""
