"""`grpo train`.

train        the loop and its four stages; start reading here
prefetch     rollouts that are sampled ahead of the updates
history      the record that a training appends its iterations and evaluations to
callbacks    what follows each iteration: its report, trackers, policies that are deleted, guardrails, an early end
hooks        the function that is called after every iteration, and may end the run
summary      the summary at the end, also of a run that had nothing left to do
"""
