"""The program `grpo`.

main             the entry point and the exit codes
flow_commands    the commands that run a flow, which are also functions for scripts and notebooks
verification_commands   the same that compute again what is stored or exported
setup_commands   the commands before and beside a run
subcommands      the commands that read stored runs or delete parts of them, and `grpo rewards ...`
options          shared options, requests whose fields are options, questions, and how errors become exit codes
"""
