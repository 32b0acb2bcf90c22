"""The terms of the loss, each a small pure function.

settings          every option, and what each loss accepts
policy_loss       every loss: policy term (clipped, cispo, sapo, vespo), reduction; the user's own loss
nft               DiffusionNFT's regression, which has no ratios
ratios            importance ratio of a token, or of its sequence (GSPO); weights for another sampler; k1, k2, k3
reductions        the tokens that count, and from one value per token to one number, each with its denominator
microbatch_loss   all of these composed into the loss of a microbatch, and its clip counts
"""
