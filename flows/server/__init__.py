"""Prefect's server: started with good settings, and asked before a command relies on it.

access        who may reach it: address, authentication, what browsers are allowed
database      SQLite or PostgreSQL: the address mended, everything tried before the server starts
start         `grpo ui`: the server in this process until it is told to end
silent_runs   the automation that turns a run without heartbeats into a crashed one, and its patience after a restart
reachable     what other commands ask of a server before any work: does it answer, are its pools there
"""
