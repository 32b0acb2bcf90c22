"""`grpo evaluate`: held-out scores of a stored policy version.

plan       checks the request against the run: policy, prompts, folder
evaluate   the flow and its summary
"""
