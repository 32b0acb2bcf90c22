"""`grpo train`.

train        the loop and its four stages; start reading here
prefetch     rollouts that are sampled ahead of the updates
evaluation   held-out evaluations while training, guardrails, reward hacking
history      records of the finished iterations; the report of an iteration
summary      the summary at the end
"""
