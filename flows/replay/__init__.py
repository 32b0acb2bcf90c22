"""`grpo replay`: train a policy from stored rollouts."""
