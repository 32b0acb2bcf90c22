"""Artifacts of a stage: written whole under a manifest with sha256, verified when read."""
