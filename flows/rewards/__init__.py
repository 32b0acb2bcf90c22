"""`grpo rewards`: fetch weights, analyse stored scores and serve rewards over HTTP."""
