"""Rewards of texts: the answer beside the prompt, a format, a box."""
