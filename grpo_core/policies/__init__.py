"""Models that can be trained: each samples tokens, renders them, and gives their log-probs again.

protocol     what the stages ask of a policy
family       the kinds of policy by name, and what can be known of a model before it is loaded
estimate     the records of what a model needs of a GPU and of the disk
trained/     LoRA or full weights: what is trained, how it is saved, and how the reference is had
glm_image/   GLM-Image: an autoregressive model over image tokens, then a diffusion decoder
causal_lm/   any causal language model of transformers
"""
