"""`grpo worker`: a process that keeps its model and runs the stages of a work pool."""
