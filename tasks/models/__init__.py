"""The models of a run.

devices        the devices and threads of torch that a placement names
reachable_hub  whether the Hugging Face Hub can be reached
initial        what training starts from: the model's files, their digests, a stored adapter over them
resident       the policy that a process keeps loaded between stages
"""
