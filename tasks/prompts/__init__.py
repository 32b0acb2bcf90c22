"""Prompt files, repositories of `datasets`, the curriculum and target images."""
