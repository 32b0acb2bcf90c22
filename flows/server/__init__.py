"""Prefect's server: started with our settings, and checked before a command relies on it.

start                  `grpo ui`: the server in this process until a signal ends it
access                 who may reach it: address, authentication, what browsers are allowed
database               SQLite or PostgreSQL: the address, and a first connection before the server starts
heartbeat_automation   the automation that marks a run without heartbeats as crashed
reachable              what other commands check: the server answers, its pools are there
temporary              the server that Prefect starts for a single run ends with that run
"""
