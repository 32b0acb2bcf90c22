"""The shipped models, prompts, target images, and :mod:`data.recipes`, which made them."""
