"""The folder of a run: its names, and the only reader of it.

layout    paths and names of folders and files; a sampling round, a stored iteration, a stored evaluation
lookup    finds a run by name or path; its description, run.json and config.yaml; its starts
reader    lists, finds and verifies artifacts, and reports damage; changes nothing
stored    configuration, iterations and evaluations for flows that use them again; stored_policies chooses versions
origin    what a run's policy was trained from
trust     what a stranger's configuration would run, connect to, read or write
run_view  the history of a run, its signs and its summary; read_run reads a run's folder into it
signs     what is wrong with a training, found in its metrics; hacking: its reward rises while a guardrail falls
sources   the images in prompts, stored once by their digests and verified when read
samples   rollouts, images, scores and advantages of samples, joined; stored_streams has the tokens and denoising steps
          of rollouts: columns, states, rows for training, metrics
frames    the tables of a run as polars frames, for scripts and notebooks
"""
