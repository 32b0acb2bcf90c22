"""The algorithm, in torch alone: nothing here knows of Prefect, of run folders or of configuration files.

records      what passes between the stages: token batches, training rows
seeds        every random number of a run, from (run seed, iteration, stage, sample)
policies/    models that sample tokens and give their log-probs again
sampling     one uniform number a token; top-k, top-p and min-p with the ids that they leave
logprobs     hidden states or logits -> log-probs over the ids that could be drawn, a chunk of tokens at a time
collect      prompts -> groups of images or texts with the log-probs they were sampled with
rewards/     functions from finished samples to scores, and their weighted sum
advantages/  rewards of a group -> advantages
losses/      log-probs and advantages -> the loss, every family of it
parity       the gate before the first optimizer step: stored against recomputed log-probs
update/      one policy update over stored rollouts, on one process or several
optimizer/   AdamW, its schedule, and their state without pickle
errors       wrong input, and numbers that are not finite
"""
