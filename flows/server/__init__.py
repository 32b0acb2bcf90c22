"""Prefect's server: started with our settings, and checked before a command relies on it.

start                  `grpo ui`: Prefect's own server with our settings, and who may reach it
heartbeat_automation   the automation that marks a run without heartbeats as crashed
reachable              checks of other commands: the server answers, its pools exist
temporary              the server of a single process: started beside the imports, ended with the process
"""
