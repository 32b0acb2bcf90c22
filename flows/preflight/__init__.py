"""Checks that run before any model loads.

files    the first look: model and prompt files that do not exist
prompts  prompts, targets and image sizes
rewards  the rewards, what they need of the prompts, and a trial of functions
model    the model, and the devices and processes that it runs on
engine   whether a vLLM server can sample this policy
trust    what a stored run's configuration would use, and whether this person knows it; the configuration of a request
machine  what this machine has for a run: GPU memory, disk, fonts; how much work a training is
inputs   the checks of a run or an evaluation, in their order
loaded   `grpo doctor --load`: the model as a run loads it, beside the estimate
measured  what a loaded policy takes on its device
doctor   `grpo doctor`: the same checks, where the weights are, and estimates of memory and disk
"""
