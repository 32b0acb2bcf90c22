"""`grpo replay`: train a policy from stored rollouts.

plan     checks the request against the source: iterations, advantages, staleness
replay   the flow and its summary
"""
