"""Metrics of an iteration: their names (names), and how they are pooled over sampling rounds (pooled)."""
