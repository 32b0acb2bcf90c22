"""Checks that run before any model loads.

inputs   checks prompts, model, rewards, device, storage and server before a run
doctor   `grpo doctor`: the same checks, and estimates of memory and disk
"""
