"""The metrics of an iteration, gathered from its artifacts."""
