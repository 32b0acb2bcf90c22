"""The program `grpo`: one file for each group of commands, errors in one place."""
