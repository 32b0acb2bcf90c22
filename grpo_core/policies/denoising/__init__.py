"""Denoising as actions: noisy steps of any pipeline with a flow-matching Euler scheduler, recorded and scored again.

settings    number of steps, guidance, kind of noise and the window of noisy steps; imports no torch
kernels     mean and std of one noisy step, its log-prob, and the exact KL between two steps
scheduler   schedulers that a pipeline runs over while it samples, and while its stored steps are scored
component   the denoising model of any such pipeline as a component of a policy
saved_scheduler which schedulers are refused, by their configuration; imports no torch
sample_rows from groups to the rows of the pipeline's calls, and back
images      from the levels that a pipeline returns to images
"""
