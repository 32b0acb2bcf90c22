"""`grpo init`: a folder with a commented configuration for one's own prompts, rewards and model.

write      checks the request, writes the folder, and checks what it wrote as a run would
templates  what the shipped models change in the configurations of configs/init, example prompts and rewards
"""
