"""The program `grpo`.

main                     the entry point and most commands
prune, rewards, worker   the other commands
options                  shared options, and commands whose options are the fields of a request
errors                   errors become messages and exit codes
"""
