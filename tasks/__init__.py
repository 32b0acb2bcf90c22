"""Prefect tasks: each stage reads artifacts, makes one call into grpo_core, and writes one artifact.

The four stages, a room each:

rollouts     sample groups of outputs with a policy, and plan their prompts, names and seeds
rewards      score rollouts, one table per reward, in this process or in several side by side
advantages   scores of siblings -> rewards and advantages; copied for a replay
update       rollouts and advantages -> the next policy, in one process or in several of accelerate

What they work with:

prompts      prompt files, target images, and which prompts an iteration samples
models       the files of a model, and the policy that a process keeps loaded
metrics      names of metrics, and how they are pooled over sampling rounds
runs         names in a run folder, and the only reader of it
execution    the key of a stage's result, where a stage runs, retries and cancellation
storage      artifacts, locks, tables and Prefect's results on any fsspec URL

What people do with a run afterwards:

reports      tables, curves, images and pages
pruning      what of a run can be deleted

checkout     the folder that this program runs from
progress     log lines and progress totals of a stage
"""
