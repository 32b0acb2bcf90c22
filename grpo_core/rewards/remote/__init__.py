"""Rewards that another process computes, over HTTP."""
