"""Weights that a reward comes from: a local path or a name on the Hugging Face Hub, checked before anything loads.

- ``source``: where files are, on disk or on the Hub: what is wrong with them, and downloads.
- ``files``: one weight file (``path`` or ``hf://owner/repo/file``) with its digest, and the tensors in it.
- ``models``: a complete transformers model (a folder or ``owner/repo``) with one digest over its files.
- ``fetch``: downloads of what is published, for ``grpo rewards fetch``.
"""
