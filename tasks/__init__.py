"""The four stages as Prefect tasks. Each reads artifacts, makes one call into grpo_core, writes one artifact.

collect_rollouts, score_rewards, compute_advantages, update_policy
plan         which prompts an iteration or an evaluation draws, with which seeds
prompts, targets, input_files, prompt_formats     what a person gives
model_files  what a model's files are, by content
models       the policy that this process holds, taken from version to version
caching      the key of a stage's result
storage/     where results are kept
reports/     what a person sees: tables, curves, pictures
record       an iteration's figures, gathered from its stages
progress     how far a stage is
"""
