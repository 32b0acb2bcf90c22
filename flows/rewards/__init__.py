"""`grpo rewards`: analyse stored scores and serve rewards over HTTP."""
