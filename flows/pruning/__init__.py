"""`grpo prune`: what of a run may go, and its going.

command, request   what is asked for, as rules
needs, plan        what is still needed and by whom; what goes, and what stays although the rules would let it go
prune              holds the run, carries the plan out and tells it; terminal prints that
"""
