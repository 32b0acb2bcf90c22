"""Denoising as actions: noisy steps of any pipeline with a flow-matching Euler scheduler, recorded and scored again.

settings    number of steps, guidance, kind of noise, the window of noisy steps, refused schedulers; imports no torch
scheduler   one noisy step, its log-prob and KL; schedulers that a pipeline runs over to sample and to score
sampling    the denoising model of any such pipeline while it samples
component   the same as a component of a policy, which scores stored steps
rows        pipelines as they are loaded, the rows of their calls, and images of latents
"""
