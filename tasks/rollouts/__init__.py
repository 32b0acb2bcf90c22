"""Stage 1: a policy samples a plan and keeps every rollout."""
