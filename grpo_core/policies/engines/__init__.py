"""Engines: who samples completions in place of the policy's own loop, called as that is.

settings: names and options, without libraries, and what an engine says of itself.
vllm: servers over HTTP as an engine.
vllm_requests: what one is asked for a row, with images or without, and what it answers.
vllm_server: one of them, and the adapters that it has loaded. vllm_checks: whether it can sample a policy.

An engine gets ids, images and seeds and returns ids and log-probs; prompts, stop texts and templates are the policy's.
"""
