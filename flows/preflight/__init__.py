"""Checks that run before any model loads.

files    the first look: model and prompt files that do not exist
inputs   checks prompts, model, rewards, device, storage and server before a run
doctor   `grpo doctor`: the same checks, and estimates of memory and disk
"""
