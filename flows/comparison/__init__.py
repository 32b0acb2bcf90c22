"""`grpo compare`: runs laid side by side, read from what they stored; nothing is computed by a model."""
