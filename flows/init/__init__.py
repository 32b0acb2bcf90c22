"""`grpo init`: a folder with a shipped configuration for one's own prompts, rewards and model.

`starting_point` chooses the shipped file, `config_text` puts the person's names into it, and `write_folder` writes and
checks the result.
"""
