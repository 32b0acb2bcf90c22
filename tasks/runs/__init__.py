"""The layout of a run folder and the only reader of it."""
