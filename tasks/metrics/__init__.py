"""Metrics of an iteration: their names, and how a stage's are pooled over sampling rounds (pooled)."""
