"""Several processes that share one update: each takes its part of every minibatch, and gradients are added up."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from grpo_core.optimizer import PolicyOptimizer
from grpo_core.policies.trained import TrainedModel

Part = TypeVar("Part")


class ProcessGroup(Protocol):
    """The processes of one update, seen from one of them.

    Attributes:
        rank: this one's number, from 0.
        count: how many there are.
    """

    rank: int
    count: int

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every process the sum of all processes' gradients."""

    def add(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The sum of all processes' values, on every process."""

    def gradient_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Scale the gradients to a total norm of at most max_norm; returns the norm before."""

    def distribute(self, trained: TrainedModel) -> None:
        """Before the optimizer is made: all processes hold the same weights, and each is left with what it needs.

        Raises:
            RuntimeError: the weights of two processes differ.
        """

    def load_state(self, optimizer: PolicyOptimizer, state: Mapping[str, Tensor]) -> None:
        """`PolicyOptimizer.load_state`, from a state that every process has whole."""

    def state(self, optimizer: PolicyOptimizer) -> dict[str, Tensor]:
        """`PolicyOptimizer.state`, whole in the first process and empty in the others."""

    def collect(self, trained: TrainedModel) -> None:
        """After the update: the first process has all of the model that a version is saved from."""


class _Alone:
    rank = 0
    count = 1

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """There is nobody to add anything."""

    def add(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The values themselves."""
        return values

    def gradient_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """See Ranks.gradient_norm."""
        return float(nn.utils.clip_grad_norm_(list(parameters), max_norm))

    def distribute(self, trained: TrainedModel) -> None:
        """There is nobody to share with."""

    def load_state(self, optimizer: PolicyOptimizer, state: Mapping[str, Tensor]) -> None:
        """See Ranks.load_state."""
        optimizer.load_state(state)

    def state(self, optimizer: PolicyOptimizer) -> dict[str, Tensor]:
        """See Ranks.state."""
        return optimizer.state()

    def collect(self, trained: TrainedModel) -> None:
        """All of it is here."""


SINGLE_PROCESS: ProcessGroup = _Alone()
"""One process that does everything."""


def share(parts: Sequence[Part], process_group: ProcessGroup) -> list[tuple[Part, bool]]:
    """The parts that this process takes, and whether each counts.

    Every process takes as many, because a sharded model gathers its weights in each pass of each process; one that
    runs out repeats the last part, which then counts for nothing.
    """
    rounds = -(-len(parts) // process_group.count)
    taken = [number * process_group.count + process_group.rank for number in range(rounds)]
    return [(parts[min(index, len(parts) - 1)], index < len(parts)) for index in taken]
