"""Processes that share one update: each computes its part of every minibatch, and gradients are summed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from grpo_core.policies.trained.model import TrainedModel
from grpo_core.update.optimizer import PolicyOptimizer

Part = TypeVar("Part")


class ProcessGroup(Protocol):
    """The processes of one update, seen from the one of number `rank`, from 0."""

    rank: int
    count: int

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every process the sum of all processes' gradients."""

    def add(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the sum of all processes' values, on every process."""

    def from_first(self, value: Any) -> Any:
        """Return the first process's value, plain JSON, on every process; the others' are ignored."""

    def gradient_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Scale the gradients to a total norm of at most max_norm; return the norm before."""

    def distribute(self, trained: TrainedModel) -> None:
        """Before the optimizer is made, give each process its part; RuntimeError if the weights of two differ."""

    def load_state(self, optimizer: PolicyOptimizer, state: Mapping[str, Tensor]) -> None:
        """Load the optimizer's state, which every process has in full."""

    def state(self, optimizer: PolicyOptimizer) -> dict[str, Tensor]:
        """Return the optimizer's full state in the first process and nothing in the others."""

    def collect(self, trained: TrainedModel) -> None:
        """Give the first process all weights after the update, so that it can save the version."""


class _SingleProcess:
    rank = 0
    count = 1

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        pass  # the gradients are the sum already

    def add(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return values

    def from_first(self, value: Any) -> Any:
        return value

    def gradient_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(list(parameters), max_norm))

    def distribute(self, trained: TrainedModel) -> None:
        pass  # this process keeps all weights

    def load_state(self, optimizer: PolicyOptimizer, state: Mapping[str, Tensor]) -> None:
        optimizer.load_state(state)

    def state(self, optimizer: PolicyOptimizer) -> dict[str, Tensor]:
        return optimizer.state()

    def collect(self, trained: TrainedModel) -> None:
        pass


SINGLE_PROCESS: ProcessGroup = _SingleProcess()
"""The group of an update in one process."""


def share(parts: Sequence[Part], process_group: ProcessGroup) -> list[tuple[Part, bool]]:
    """Return the parts that this process computes, and whether each counts.

    Every process computes equally many, because a sharded model gathers its weights in each pass of each process; one
    that runs out repeats the last part.
    """
    rounds = -(-len(parts) // process_group.count)
    indices = [number * process_group.count + process_group.rank for number in range(rounds)]
    return [(parts[min(index, len(parts) - 1)], index < len(parts)) for index in indices]
