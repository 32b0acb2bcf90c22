"""The models of a run.

initial    what training starts from: the model's files, their digests, a stored adapter over them
resident   the policy that a process keeps loaded between stages
"""
