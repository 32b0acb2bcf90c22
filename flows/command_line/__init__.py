"""The program `grpo`.

main          the entry point, and the commands that train, score and serve
subcommands   the commands that read stored runs or delete parts of them, and `grpo rewards ...`
options       shared options, requests whose fields are options, questions, and how errors become exit codes
"""
