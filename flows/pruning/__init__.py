"""`grpo prune` and `run.keep_policies`: delete artifacts that nothing depends on.

request    the options, as rules
needs      what is still needed, and why: by the run's next start, replays, and flows that Prefect's server will run
plan       decides what is deleted and what is kept, with the reasons
prune      locks the run, carries the plan out and reports it
keep       the rules for policy versions, while a run trains
"""
