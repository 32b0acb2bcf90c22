"""`grpo worker`: a process that keeps its model and runs the stages of a work pool.

worker       polls the pool, runs what it takes, and ends when it is told to, or on its own
stage_flows  the stages as flows
pools        work pools for these workers
"""
