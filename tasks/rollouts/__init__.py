"""Stage 1.

plan               prompts, sample ids and seeds of a sampling round or an evaluation
previews           the seeds of a round whose previews are the best and the worst
collect_rollouts   the stage: a policy and a plan -> stored rollouts; images for baselines
engines            who samples a plan: the policy in memory, or vLLM servers
vllm               rollouts by vLLM servers; vllm_server starts one for the run
columns            groups of rollouts -> the columns that are stored
"""
