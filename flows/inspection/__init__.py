"""`grpo inspect` and `grpo list`: what runs recorded, read back for the terminal and the page."""
