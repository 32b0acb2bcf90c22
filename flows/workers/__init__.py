"""`grpo worker`: a process that keeps its model and runs the stages of a work pool.

worker       makes the pool, polls it, runs what it takes, and ends when it is told to, or on its own
stage_flows  the stages as flows
"""
