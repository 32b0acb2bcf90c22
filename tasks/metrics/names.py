"""Names and prefixes of metrics that more than one module uses."""

HELDOUT, STEP_TIME = "heldout_reward", "step_time"
"""Mean held-out reward of the policy that an iteration made; seconds of all its stages."""

SECONDS, GUARDRAILS = "seconds/", "guardrails/"
"""Prefixes: seconds by stage; mean of a guardrail over the held-out samples, by label."""

TOKENS, ALL_TOKENS = "tokens", "num_tokens"
"""Tokens of an iteration's rollouts, prompts included, and of all iterations so far."""

RUNNING = "running/"
"""Prefix of a reward's moments over all iterations so far, kept with the advantages and not shown to people."""
