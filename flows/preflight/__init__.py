"""Checks that run before any model loads.

inputs   what a run refuses to start with: prompts, model, rewards, device, storage, server
doctor   `grpo doctor`: the same checks, and estimates of memory and disk
"""
