"""`grpo inspect`: what a run recorded, read back for the terminal and the page."""
