"""Models that can be trained: each samples tokens, renders them, and recomputes their log-probs.

protocol        the interfaces of a policy, the base of a kind of policy, and the kinds by name
sizes           what decides the memory of a model, as its family counts it
estimate        how much GPU memory and disk space a model needs
trial           whether a loaded model can be trained: it samples a little and is scored
shared_trial    whether it gives the same where a prompt is computed once
microbatches    how rows are cut into microbatches
drafts          token sequences of groups, each drawn once
encoded_prompts one prompt as a model reads it; several, padded; those that were used last
kv_cache        keys and values of sampled tokens, growing in place
pipeline_loading  a diffusers pipeline by folder or hub name: one network, or all of them, frozen
trained/        LoRA or full weights: what is trained, how it is saved, and copies such as the reference
denoising/      the denoising steps of any flow-matching pipeline as actions
glm_image/      GLM-Image: an autoregressive model over image tokens, then a diffusion decoder
diffusers/      pipelines of diffusers with a flow-matching Euler scheduler, to make or edit images
causal_lm/      any causal language model of transformers
engines/        a policy that a vLLM server samples
vision_lm/      any vision-language model of transformers
"""
