"""A user's function, written for TRL, as a reward.

reward      what it is called with and how its answer is read
call_log    what it reports beside its scores
"""
