"""The program `grpo`.

main          the entry point, and the commands that train, score and serve
stored_runs   the commands that read stored runs: inspect, list, compare, export, sample, prune
rewards       the commands `grpo rewards ...`
questions     what a command asks in a terminal
options       shared options, requests whose fields are options, and how errors become messages and exit codes
"""
