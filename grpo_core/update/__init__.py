"""One policy update over stored rollouts: iteration > epoch > minibatch (one optimizer step) > microbatch.

settings        how rows become optimizer steps, minibatches and microbatches
policy_update   the update by importance ratios: log-probs before it, the parity gate, the steps
gradient        the gradient of its minibatches, added up over microbatches
nft_update      the update by DiffusionNFT, from finished images alone
forward_process images with noise added again, for it
step            one optimizer step, and what surrounds the steps of any algorithm
metrics         the measurements of the steps, under TRL's names
process_group   the processes that share one update
accelerated     process groups over accelerate: the full model in each process, or a share of it (FSDP2)
"""
