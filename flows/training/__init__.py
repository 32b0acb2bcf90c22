"""`grpo train`.

train        the loop and its four stages; start reading here
prefetch     rollouts that are sampled ahead of the updates
history      held-out evaluations while training, guardrails; the report of an iteration
signs        what a run does about a sign of reward hacking
summary      the summary at the end
"""
