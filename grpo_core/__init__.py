"""The algorithm, in plain torch, without Prefect, run folders or configuration files.

rollouts/    what a rollout consists of: messages, images, streams of actions, records that pass between the stages
seeds        every random number of a run, derived from (run seed, iteration, stage, sample); digests of files
policies/    models that sample tokens and give their log-probs again
sampling     one uniform number per token; top-k, top-p and min-p with the ids that they leave
logprobs     hidden states or logits -> log-probs over the ids that could be sampled, in chunks of tokens
collect      prompts -> groups of images or texts with the log-probs they were sampled with
rewards/     functions from finished samples to scores, and their weighted sum
advantages/  rewards of a group -> advantages
losses/      log-probs and advantages -> the loss, for every loss in the registry
parity       the gate before the first optimizer step: stored against recomputed log-probs
update/      one policy update over stored rollouts, on one process or several; the optimizer
settings     the ranges and choices of settings, checked from their annotations; how tokens are sampled
user_code/   a reward or a loss of the user's: which files are its code, loaded by import path
pipeline_files  the files of a saved model or diffusers pipeline
hub          repositories of the Hugging Face Hub: files, downloads, a message for each failure
services     requests to a service that may be slow, busy or gone
transfers    several tensors between the CPU and a device at once
uses         what a setting can make a machine do, marked where the setting is declared
errors       wrong input, numbers that are not finite, secrets in addresses
"""
