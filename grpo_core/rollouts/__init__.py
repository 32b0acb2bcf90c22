"""What a rollout consists of, from its prompt to the rows that train a policy.

messages    prompts that are conversations: what models, rewards and people get of them, and what a chat template prints
images      read from files within bounds, brought to RGB and to the size of another; those of prompts
streams     what a policy generates, and the streams of actions that train it
actions     sampled tokens and denoising steps, with what is needed to compute their log-probs again
ragged      the rows of an update without padding, of which microbatches are selected
records     what passes between the stages: requests, groups of rollouts, training rows
"""
