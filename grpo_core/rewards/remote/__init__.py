"""Rewards that another process computes, over HTTP.

- ``reward``: scores of any server that speaks the protocol of docs/remote_rewards.md.
- ``wire``: that protocol; ``http``: requests with a time limit and retries.
"""
