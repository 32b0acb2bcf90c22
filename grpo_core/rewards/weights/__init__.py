"""Weights that a reward comes from: a local path or a name on the Hugging Face Hub, checked before anything loads.

- ``files``: one weight file (``path`` or ``hf://owner/repo/file``) with its digest.
- ``models``: a complete transformers model (a folder or ``owner/repo``) with one digest over its files.
- ``tensors``: what a weight file contains, and whether it fits a network.
- ``hub``: the local cache of the Hub and downloads into it.
"""
