"""`grpo train`.

train        the loop and its four stages; start reading here
prefetch     rollouts that are sampled ahead of the updates
hooks        the function that is called after every iteration, and may end the run
callbacks    what follows each iteration: report, trackers, policies that are deleted, an early end
history      the record that a training appends its iterations and evaluations to
publication  the report of an iteration in Prefect's UI, made and stored beside the next one's stages
signs        what a run does about a sign of reward hacking
summary      the summary at the end
finished     a run that has nothing left to do, read from its files
"""
