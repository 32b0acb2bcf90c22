"""The optimizer of one policy, from step to step and from iteration to iteration."""

from collections.abc import Mapping

from torch import Tensor, nn

from grpo_core.optimizer.kinds import build_optimizer
from grpo_core.optimizer.settings import OptimizerSettings
from grpo_core.optimizer.state import read_state, take_state, write_state


class PolicyOptimizer:
    """The optimizer of one policy, from step to step and from iteration to iteration."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, *, steps: int = 0) -> None:
        """Build the optimizer.

        Args:
            parameters: what is trained, by name, in a fixed order.
            settings: for AdamW and its schedule.
            steps: optimizer steps already made; the schedule continues from there.

        Raises:
            InputError: the optimizer cannot be run on this machine.
        """
        self.parameters = dict(parameters)
        self.steps = steps
        self._kind = settings.optimizer
        self._schedule = settings.schedule()
        self._optimizer = build_optimizer(
            settings.optimizer,
            self.parameters.values(),
            learning_rate=self._schedule(steps),
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self._schedule(self.steps)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Make one optimizer step at the scheduled learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._optimizer.step()
        self.steps += 1

    def state(self) -> dict[str, Tensor]:
        """Copy the optimizer's state to the CPU as named tensors; `steps` is not part of it."""
        return write_state(self._kind, self.parameters, self._optimizer)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned; a refused state changes nothing.

        Raises:
            InputError: the state is another kind of optimizer's.
            ValueError: it is of other parameters, of other shapes or dtypes, or incomplete.
        """
        loaded = read_state(self._kind, self.parameters, state)
        if self.steps and not loaded:
            raise ValueError(f"the optimizer state is empty, but {self.steps} steps were made with it")
        take_state(self._kind, self.parameters, self._optimizer, loaded)
