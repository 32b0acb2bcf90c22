"""`grpo rescore`: score stored rollouts with other rewards."""
