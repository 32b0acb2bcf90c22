"""`grpo evaluate`: held-out scores of a stored policy version.

plan       the request checked against the run: policy, prompts, folder
evaluate   the flow and its summary
"""
