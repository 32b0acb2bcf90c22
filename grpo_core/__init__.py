"""The algorithm, in torch alone: nothing here knows of Prefect, of run folders or of configuration files.

records      what passes between the stages: token batches, training rows
seeds        every random number of a run, from (run seed, iteration, stage, sample)
policies/    models that sample tokens and give their log-probs again
collect      prompts -> groups of pictures with the log-probs they were sampled with
rewards/     functions from finished samples to scores, and their weighted sum
advantages   rewards of a group -> advantages
logprobs     logits -> log-probs over the ids that can be sampled
losses       log-probs and advantages -> the clipped surrogate with its KL
parity       the gate before the first optimizer step: stored against recomputed log-probs
update       one policy update over stored rollouts: epochs, minibatches, microbatches
optimizer    AdamW, its schedule, and their state without pickle
errors       wrong input, and numbers that are not finite
"""
