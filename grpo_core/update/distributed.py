"""Process groups over torch.distributed: one process per GPU, or several on the CPU, on one machine or on several.

Each has the full model, or a share of it (FSDP2). Gradients are summed once per minibatch, over denominators that count
all of it, with the traffic of DistributedDataParallel's `no_sync` and without a wrapper around the model.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from grpo_core.policies.trained.model import TrainedModel
from grpo_core.update.optimizer import PolicyOptimizer

BUCKET_ELEMENTS = 1 << 26
CHECKED_AT_ONCE = 1 << 24
# While one process writes a large policy the others wait; whoever started them ends all if one fails.
TIMEOUT = timedelta(days=7)


def join(store: Store, rank: int, count: int, device: torch.device) -> None:
    """Join the other processes, found by the store, once in a process's life; every one of them has to call this.

    A GPU, the only one that the process sees unless it has an index, becomes the current one.
    """
    if device.type == "cpu":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT)
        return
    gpu = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(gpu)
    # With its device NCCL connects now, where a network that does not work is told from an update that does not.
    dist.init_process_group("nccl", store=store, rank=rank, world_size=count, timeout=TIMEOUT, device_id=gpu)


class DistributedProcessGroup:
    """A ProcessGroup of the processes that have joined; the backward pass already sums sharded gradients."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rank, self.count = device, dist.get_rank(), dist.get_world_size()

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every process the sum of all processes' gradients, bucket by bucket.

        A parameter that has none on some processes, as of a vision encoder whose rows have no images, counts there as
        zero, so that all have the same buckets; one that has none anywhere keeps none.
        """
        replicated = [each for each in parameters if not isinstance(each, DTensor)]
        reached = torch.tensor([each.grad is not None for each in replicated], dtype=torch.int32, device=self.device)
        dist.all_reduce(reached, dist.ReduceOp.MAX)
        known = [each for each, is_reached in zip(replicated, reached.tolist(), strict=True) if is_reached]
        for parameter in known:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in in_buckets(_gradients(known)):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, total in zip(bucket, flat.split([part.numel() for part in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def add(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the sum of all processes' values, on every process."""
        total = values.to(self.device, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.to(values.device)

    def from_first(self, value: Any) -> Any:
        """Return the first process's value on every process; the others' are ignored."""
        # As JSON: torch's own broadcast of objects unpickles what arrives.
        content = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        length = torch.tensor(len(content), device=self.device)
        dist.broadcast(length, 0)
        received = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            received.copy_(content)
        dist.broadcast(received, 0)
        return json.loads(bytes(received.tolist()))

    def gradient_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Scale the gradients to a total norm of at most max_norm; return the norm before."""
        replicated, shares = _split_by_sharding(parameters)
        if not shares:
            return float(nn.utils.clip_grad_norm_(replicated, max_norm))
        local = [gradient.to_local() for gradient in _gradients(shares) if isinstance(gradient, DTensor)]
        # Of no gradients it is on the CPU, where NCCL cannot communicate.
        square = get_total_norm(local).double().square().to(self.device)
        dist.all_reduce(square)
        norm = float((square + get_total_norm(_gradients(replicated)).double().square().to(square)).sqrt())
        # The same formula as in torch's clip_grad_norm_.
        scale = min(1.0, max_norm / (norm + 1e-6))
        for gradient in [*local, *_gradients(replicated)]:
            gradient.mul_(scale)
        return norm

    def distribute(self, trained: TrainedModel) -> None:
        """Check that all processes have the same weights; each keeps all of them.

        All cut microbatches alike, however close to its bound a trial was in one of them.
        """
        self.require_equal(dict(trained.model.named_parameters()))
        trained.shares_prompts = self.from_first(trained.shares_prompts)

    def load_state(self, optimizer: PolicyOptimizer, state: Mapping[str, Tensor]) -> None:
        """Load a state that every process has in full."""
        optimizer.load_state(state)

    def state(self, optimizer: PolicyOptimizer) -> dict[str, Tensor]:
        """Return the full state in the first process and nothing in the others."""
        return {} if self.rank else optimizer.state()

    def collect(self, trained: TrainedModel) -> None:
        """Check that the trained weights are the same on every process."""
        self.require_equal(trained.trainable_parameters())

    def require_equal(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError if two processes have other weights; it names the first that differs."""
        replicated = {name: value.detach() for name, value in parameters.items() if not isinstance(value, DTensor)}
        if not replicated:
            return
        # Weights are on several devices where networks that are not in use are in CPU memory.
        checksums = torch.stack([_checksum(value).to(self.device) for value in replicated.values()])
        first = checksums.clone()
        dist.broadcast(first, 0)
        # NaN is equal to nothing, and the update reports weights that are not finite.
        differing = ~torch.isclose(checksums, first, rtol=0.0, atol=0.0, equal_nan=True)
        if self.add(differing.any(-1).float().cpu()).any():
            names = [name for name, differs in zip(replicated, differing.any(-1).tolist(), strict=True) if differs]
            raise RuntimeError(
                f"process {self.rank} of {self.count}: the weights are not those of process 0"
                + (f", {names[0]} first" if names else " on another process")
                + "; every process has to load the same files with the same libraries"
            )


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _split_by_sharding(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Separate replicated from sharded parameters; torch's operations do not accept both together."""
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in parameters:
        parts[isinstance(parameter, DTensor)].append(parameter)
    return parts


def in_buckets(tensors: Sequence[Tensor], elements: int = BUCKET_ELEMENTS) -> Iterator[list[Tensor]]:
    """Yield buckets of one dtype and of a bounded size, so that copies stay small."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(part.numel() for part in bucket) + tensor.numel() > elements
        if bucket and (full or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _checksum(values: Tensor) -> Float[Tensor, " sums"]:
    """Return sums that change with any value and with the order of the values."""
    sums = torch.zeros(3, dtype=torch.float64, device=values.device)
    places = torch.arange(1, min(values.numel(), CHECKED_AT_ONCE) + 1, device=values.device).double().sqrt()
    for part in values.flatten().split(CHECKED_AT_ONCE):
        exact = part.double()
        sums += torch.stack([exact.sum(), exact.square().sum(), exact @ places[: len(exact)]])
    return sums


class ShardedProcessGroup(DistributedProcessGroup):
    """A ProcessGroup in which each process has a share of every layer and gathers the full layer while it runs.

    torch's `fully_shard` (Zhao et al., 2023, arXiv:2304.11277) of each layer, then of the rest of the inner model. The
    output head, and an embedding tied to it, stay unsharded: log-probs of tokens run the inner model once, then the
    head for one chunk of tokens at a time, of which processes have different numbers. So does what sees images.
    """

    def distribute(self, trained: TrainedModel) -> None:
        """Shard the model, which replaces its parameters, and cut the reference's values like them."""
        super().distribute(trained)
        # Each process has to make equally many passes, and shared prompts make more where completions are ragged.
        trained.shares_prompts = False
        _shard(trained.model, init_device_mesh(self.device.type, (self.count,)))
        parameters = trained.trainable_parameters()
        for copy in trained.copies.values():
            copy.change(lambda name, value: _share_of(value, parameters[name]))

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

        Sharded values are then in CPU memory, and empty in all but the first process.
        """
        super().collect(trained)
        for copy in trained.copies.values():
            copy.change(lambda _, value: self._gather(value))
        # Both libraries take seconds to import, and an unsharded update does not need them.
        from peft import PeftModel

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
    network, inner, used_outside = _network(model)
    for module in _layers(network):
        if used_outside.issuperset(module.parameters()):
            continue
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    # Kept after the forward pass, the weights of a pass without gradients would outlive the next optimizer step.
    fully_shard(inner, mesh=mesh, reshard_after_forward=True, ignored_params=used_outside)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Denominators count the full minibatch: gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _network(model: nn.Module) -> tuple[Any, nn.Module, set[nn.Parameter]]:
    """Return the network inside adapters, the part of it that a pass runs once, and the weights used outside of that.

    A diffusers model runs as a whole; of a language model the head runs chunk by chunk, and what makes features of
    images once an image, so in some processes more often than in others, or never.
    """
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    network: Any = next(part for part in model.modules() if isinstance(part, PreTrainedModel | ModelMixin))
    if isinstance(network, ModelMixin):
        return network, network, set()
    head, inner, decoder = network.get_output_embeddings(), network.base_model, network.get_decoder()
    read_once = {each for part in (decoder, network.get_input_embeddings()) for each in part.parameters()}
    outside = {each for each in inner.parameters() if each not in read_once}
    return network, inner, outside if head is None else outside | set(head.parameters())


def _layers(network: Any) -> list[nn.Module]:
    """Return the repeated layers, as transformers and diffusers name them for sharding; the innermost first."""
    names = set(network._no_split_modules or ())
    return [module for module in reversed(list(network.modules())) if type(module).__name__ in names]


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
