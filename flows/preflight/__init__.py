"""Checks that run before any model loads.

inputs   the checks of a run or an evaluation, in their order
prompts, model, rewards, placement   what each subject is checked for
files    the first look: model and prompt files that do not exist
doctor   `grpo doctor`: the same checks, and estimates of memory and disk
"""
