"""The four stages as Prefect tasks. Each reads artifacts, makes one call into grpo_core, writes one artifact.

collect_rollouts, score_reward (one task a reward), compute_advantages, update_policy
take_advantages   in place of the third, for a replay: those that another run made
draws        rollouts with what each reward thought of them
scoring_rows, scoring_processes   stored rows -> scores, here or in processes that score side by side
stored_scores     which stored tables already hold the scores that are asked for
running_figures   moments of rewards over all iterations, carried from one to the next
rollout_rows, training_rows   sampled groups -> stored columns -> rows to learn from
update_job, update_launch, update_process, error_records   the fourth on several processes of accelerate
curriculum, dataset_shares   which prompts an iteration draws
plan         their names and seeds
prompts, targets, input_files, prompt_formats     what a person gives
model_files  what a model's files are, by content
models       the policy that this process holds, taken from version to version
caching      the key of a stage's result, and the task that is done where its placement says
code         what of the project counts as part of a key; checkout is where it lies
placing/     where a stage is done, in how many parts, and what is tried again
storage/     where results are kept
pruning/     what of them may be taken away
reports/     what a person sees: tables, curves, images
record, draw_figures, figure_names   an iteration's figures, gathered from its stages
progress     how far a stage is
"""
