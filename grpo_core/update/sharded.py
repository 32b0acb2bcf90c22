"""A process group with weights, gradients and moments sharded over the processes: FSDP2, torch's `fully_shard`.

Zhao et al., 2023 (arXiv:2304.11277). accelerate would shard the outermost module and gather the weights
outside the layers only in that module's forward pass. Log-probs bypass it: they run the inner model once, then the
output head for one chunk of tokens at a time, and processes differ in their number of chunks. So each layer is sharded,
then the rest of the inner model; the head, and an embedding that is tied to it, stay unsharded on every process.
"""

from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from grpo_core.optimizer import PolicyOptimizer
from grpo_core.policies.trained import TrainedModel
from grpo_core.update.accelerated import AcceleratedProcessGroup


class ShardedProcessGroup(AcceleratedProcessGroup):
    """A ProcessGroup in which each process has a share of every layer and gathers the full layer while it runs."""

    def distribute(self, trained: TrainedModel) -> None:
        """Shard the model, which replaces its parameters, and cut the reference's values like them."""
        super().distribute(trained)
        _shard(trained.model, init_device_mesh(self.device.type, (self.count,)))
        parameters = trained.trainable_parameters()
        trained.change_reference(lambda name, value: _share_of(value, parameters[name]))

    def load_state(self, optimizer: PolicyOptimizer, state: Mapping[str, Tensor]) -> None:
        """Load this process's share of a state that every process has completely."""
        shares = {}
        for entry, value in state.items():
            parameter = optimizer.parameters.get(entry.rpartition("|")[0])
            of_its_shape = parameter is not None and value.shape == parameter.shape
            shares[entry] = _share_of(value, parameter) if of_its_shape and parameter is not None else value
        optimizer.load_state(shares)

    def state(self, optimizer: PolicyOptimizer) -> dict[str, Tensor]:
        """Return the full state in the first process; every process has to call this."""
        full = {entry: self._gather(value) for entry, value in optimizer.state().items()}
        return {} if self.rank else full

    def collect(self, trained: TrainedModel) -> None:
        """Give the first process the full weights; every process has to call this, and the model cannot run afterwards.

        Sharded values are in CPU memory afterwards, and empty in all but the first process.
        """
        super().collect(trained)
        trained.change_reference(lambda _, value: self._gather(value))
        # Of a model with adapters only the adapters are saved.
        adapters_only = isinstance(trained.model, PeftModel)
        for module in trained.model.modules():
            # The hooks of fully_shard would expect shares when weights are loaded.
            module._load_state_dict_post_hooks.clear()
            parameters: dict[str, Any] = module._parameters
            for name, parameter in parameters.items():
                if _is_share(parameter) and (parameter.requires_grad or not adapters_only):
                    parameters[name] = nn.Parameter(self._gather(parameter), parameter.requires_grad)

    def _gather(self, value: Any) -> Tensor:
        if not _is_share(value):
            unsharded: Tensor = value
            return unsharded
        # Shares may be in CPU memory, where NCCL cannot communicate.
        full = value.detach().to(self.device).full_tensor()
        return torch.empty(0) if self.rank else full.cpu()


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    language_model = next(part for part in model.modules() if isinstance(part, PreTrainedModel))
    for module in _layers(language_model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    head = language_model.get_output_embeddings()
    used_outside = set(head.parameters()) if head is not None else set()
    # Kept after the forward pass, the weights of a pass without gradients would outlive the next optimizer step.
    fully_shard(language_model.base_model, mesh=mesh, reshard_after_forward=True, ignored_params=used_outside)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Denominators count the full minibatch: gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _layers(language_model: Any) -> list[nn.Module]:
    """Return the repeated layers, as transformers names them for sharding; the innermost first."""
    names = set(language_model._no_split_modules or ())
    return [module for module in reversed(list(language_model.modules())) if type(module).__name__ in names]


def _is_share(value: object) -> bool:
    return isinstance(value, DTensor)


def _share_of(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this process's share of a value that all processes have completely, cut like the parameter."""
    if not isinstance(parameter, DTensor):
        return value
    # No source rank: every process cuts its own copy, and nothing is sent.
    on_mesh = value.to(parameter.device)
    share = distribute_tensor(on_mesh, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return share.to(value.device)
