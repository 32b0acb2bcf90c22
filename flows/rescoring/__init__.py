"""`grpo rescore`: stored rollouts scored again with other rewards.

plan      checks the request against the runs: which scores are stored, which are missing
rescore   the flow, its report and its summary
"""
