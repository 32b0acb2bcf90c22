"""The terms of the loss, each a small pure function.

settings          every option; the names of the losses and what each accepts; imports a user's own
policy_loss       the terms clipped, cispo, sapo, vespo, grpo_guard and flow_dppo; finds a loss by its name
velocity_matching errors of velocities at noised images, with the sign of the advantage, or in pairs (DiffusionNFT)
ratios            importance ratio of a token, or of its sequence (GSPO); weights for another sampler; k1, k2, k3
reductions        the tokens that count, and from one value per token to one number, each with its denominator
microbatch_loss   all of these composed into the loss of a microbatch, and its clip counts
"""
