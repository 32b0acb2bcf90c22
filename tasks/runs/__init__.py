"""The names in a run folder, and the only reader of it.

layout         paths and names of folders and files
records        a sampling round, a stored iteration, a stored evaluation
reader         lists, finds and verifies artifacts, and reports damage; changes nothing
starts         when, where and with which code the run was started
lookup         finds a run by name or path; its description, run.json and config.yaml
stored         configuration, iterations, evaluations and policies for flows that use them again
run_view       the history of a run, its signs of reward hacking and its summary; read_run reads a run's folder
samples        rollouts, scores and advantages of samples, joined
frames         the tables of a run as polars frames, for scripts and notebooks
metrics_table  the table of an iteration's metrics
"""
