"""Models that can be trained: each samples tokens, renders them, and gives their log-probs again.

protocol     what the stages ask of a policy
adapters     LoRA or full weights: what is trained, how it is saved, and how the reference is had
glm_image/   GLM-Image: an autoregressive model over picture tokens, then a diffusion decoder
"""
