"""Prefect tasks: each stage reads artifacts, makes one call into grpo_core, and writes one artifact.

The four stages, one folder each:

rollouts     sample groups of outputs with a policy, and plan their prompts, names and seeds
rewards      score rollouts, one table per reward, in this process or in several in parallel
advantages   scores of siblings -> rewards and advantages; copies them for a replay
update       rollouts and advantages -> the next policy, in one process or in several

What the stages use:

prompts      prompt files, target images, and which prompts an iteration samples
models       the files of a model, and the policy that a process keeps loaded
metrics      names of metrics, and how they are pooled over sampling rounds
runs         names in a run folder, and the only reader of it
execution    the key of a stage's result, where a stage runs, retries and cancellation
storage      artifacts, locks, tables and Prefect's results on any fsspec URL

For finished runs:

reports      tables, curves, images and pages
pruning      deletes what a run does not need
verification  stored stages against the same stages computed again

progress     log lines and progress totals of a stage
process      the folder that this program runs from, the environment of children, pauses of garbage collection
"""
