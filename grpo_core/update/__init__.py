"""One policy update over stored rollouts.

settings        how rows become optimizer steps; the optimizer's options and the learning rate by step
policy_update   the update by importance ratios: log-probs before it, the parity gate, the steps
gradient        the gradient of its minibatches, added up over microbatches
witnesses       rows computed whole, which keep the gate independent where prompts are computed once
velocity_update the update by matching velocities, from finished images alone; velocity_settings: DiffusionNFT, AWM, ...
step            one optimizer step, what surrounds it, and its measurements under TRL's names
optimizer       the steps of an optimizer, and its state as tensors, without pickle
optimizer_kinds the optimizers by name: classes of torch and bitsandbytes
process_group   the processes that share one update
distributed     process groups over torch.distributed: the full model in each process, or a share of it (FSDP2)
"""
