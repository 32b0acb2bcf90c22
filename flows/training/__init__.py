"""`grpo train`: the loop, prefetched rollouts, evaluation, guardrails, reports, summary."""
