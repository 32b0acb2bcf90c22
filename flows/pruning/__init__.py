"""`grpo prune` and `run.keep_policies`: delete artifacts that nothing depends on.

request  the options, and what a run retains by them or by its configuration
plan     decides what is deleted and what is kept, with the reasons
prune    locks the run, carries the plan out and reports it; deletes policy versions while a run trains
"""
