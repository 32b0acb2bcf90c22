"""`grpo replay`: train a policy from stored rollouts.

plan     the request checked against the source: iterations, advantages, staleness
replay   the flow and its summary
"""
