"""The program `grpo`.

main      the entry point and most commands
rewards   the commands `grpo rewards ...`
options   shared options, requests whose fields are options, and how errors become messages and exit codes
"""
