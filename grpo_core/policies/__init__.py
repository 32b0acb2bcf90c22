"""Models that can be trained: each samples tokens, renders them, and recomputes their log-probs.

protocol     the interfaces of a policy and of a kind of policy, and the kinds by name
sizes        what decides the memory of a model, as its family counts it
estimate     how much GPU memory and disk space a model needs
kv_cache     keys and values of sampled tokens, growing in place
trained/     LoRA or full weights: what is trained, how it is saved, and the reference model
glm_image/   GLM-Image: an autoregressive model over image tokens, then a diffusion decoder
causal_lm/   any causal language model of transformers
"""
