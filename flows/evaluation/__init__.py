"""`grpo evaluate`: held-out scores of a stored policy version."""
