"""Prompt files, datasets, the curriculum and target images."""
