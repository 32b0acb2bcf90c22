"""Prefect's server: started with our settings, and checked before a command relies on it.

start                  `grpo ui`: the server in this process until a signal ends it, and who may reach it
database               SQLite or PostgreSQL: the address, and a first connection before the server starts
heartbeat_automation   the automation that marks a run without heartbeats as crashed
reachable              checks of other commands: the server answers, its pools exist
temporary              the server of a single process: started beside the imports, ended with the process
"""
