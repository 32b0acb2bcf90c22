"""Updates by process groups on the stub GPU, under the rules of NCCL, and the same alone on the CPU.

python -m tests.stub_gpu.processes FILE FAMILY    on the stub (build.py); writes numbers and collectives as JSON

The backend exchanges nothing: a group of one process has every value, one of two calls every collective of shares.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode

from configs.placement import PlacementSection
from grpo_core.update.distributed import DistributedProcessGroup, ShardedProcessGroup, join
from grpo_core.update.optimizer import PolicyOptimizer
from tasks.models.devices import configure_torch
from tasks.models.resident import load_untried
from tests.stub_gpu.families import FAMILIES, Runner, numbers
from tests.stub_gpu.host_values import HostValues, of_shapes_alone, tensors_in

_REFUSED = (torch.bool, torch.int16, torch.complex64, torch.complex128)


class NcclRules(TorchDispatchMode):
    """Refuses what NCCL does: tensors that are not on the group's GPU, not contiguous, or of a type that it lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.called = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if not (of_shapes_alone() or {*types} <= {Tensor, Parameter}):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self.called[func._schema.name] += 1
            for each in tensors_in(args):
                place = f"{func._schema.name}: {each.dtype} {list(each.shape)} {each.stride()} on {each.device}"
                assert each.device == torch.device("cuda", torch.cuda.current_device()), place
                assert each.is_contiguous(), place
                assert each.dtype not in _REFUSED, place
        return func(*args, **(kwargs or {}))


def joined(count: int) -> torch.device:
    """Join a group of so many processes as that of a GPU does, with a backend that exchanges nothing."""
    device, real = configure_torch(PlacementSection(devices="cuda")), dist.init_process_group

    def init(backend: str, *, device_id: torch.device, **given: Any) -> None:
        assert backend == "nccl"
        assert device_id == torch.device("cuda", torch.cuda.current_device())
        real("cpu:fake,cuda:fake", **given)

    dist.init_process_group = init
    join(fake_pg.FakeStore(), 0, count, device)
    dist.init_process_group = real
    return device


def main(file: str, name: str) -> None:
    family, found, called = FAMILIES[name], dict[str, Any](), Counter[str]()
    with sdpa_kernel(SDPBackend.MATH):
        here = Runner(family, "cpu")
        groups = here.sample()
        found["alone"] = numbers(groups, {stream: here.update(groups, stream) for stream in here.policy.components})
        device = joined(1)
        for kind in (DistributedProcessGroup, ShardedProcessGroup):
            with HostValues(everything=True) as values, NcclRules() as rules:
                runner, group = Runner(family, "cuda"), kind(device)
                updates = {each: runner.train(groups, each, process_group=group) for each in runner.policy.components}
                assert group.from_first(["größer", 1.5]) == ["größer", 1.5]
            assert not values.failed, values.failed
            called += rules.called
            found[kind.__name__] = numbers(groups, updates)
        dist.destroy_process_group()
        sharded = ShardedProcessGroup(joined(2))
        with NcclRules() as rules:
            # Without values no trial passes.
            runner = Runner(family, "cuda", load=load_untried)
            for stream, component in runner.policy.components.items():
                # Without values no weights are equal, and nothing is told.
                sharded.require_equal = lambda parameters: None  # type: ignore[method-assign]
                sharded.from_first = lambda value: value  # type: ignore[method-assign]
                sharded.distribute(component.trained)
                optimizer = PolicyOptimizer(component.trainable_parameters(), runner.config.updates[stream])
                for parameter in optimizer.parameters.values():
                    parameter.grad = torch.zeros_like(parameter)
                sharded.add_gradients(optimizer.parameters.values())
                sharded.gradient_norm(optimizer.parameters.values(), 1.0)
                optimizer.step()
                sharded.load_state(optimizer, sharded.state(optimizer))
                sharded.collect(component.trained)
        found["called"] = called + rules.called
    Path(file).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
