"""Models that can be trained: each samples tokens, renders them, and recomputes their log-probs.

protocol     the interface of a policy
family       the kinds of policy by name, and the checks of a model before it is loaded
estimate     how much GPU memory and disk space a model needs
trained/     LoRA or full weights: what is trained, how it is saved, and the reference model
glm_image/   GLM-Image: an autoregressive model over image tokens, then a diffusion decoder
causal_lm/   any causal language model of transformers
"""
