"""`grpo deploy`: registers training, evaluation and rescoring of a configuration with Prefect's server."""
