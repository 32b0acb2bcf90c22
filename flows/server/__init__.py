"""Prefect's server: started with our settings, and checked before a command relies on it.

prefect_settings       Prefect's settings, which it reads when it is imported
start                  `grpo ui`: Prefect's own start, with our settings and a refusal of open hosts
temporary              the server of a single process: started beside the imports, ended with the process; its database
heartbeat_automation   the automation that marks a run without heartbeats as crashed
reachable              checks of other commands: the server answers, its pools exist; watches it during a run
"""
