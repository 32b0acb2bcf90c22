"""Prompt files, data sets, the curriculum and target images."""
