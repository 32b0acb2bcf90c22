"""What the names of some figures and files begin with; imported by what must start fast, so it imports nothing."""

RUNNING = "running/"
"""Moments of a reward over all iterations so far, beside the figures of the advantages; not told to people."""

GUARDRAILS = "guardrails/"
"""Mean of a guardrail over the held-out samples."""

SIGNS_FILE = "watch.json"
"""In a run's folder: what the watch over guardrails told last."""
