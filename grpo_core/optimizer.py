"""AdamW with its learning-rate schedule, and their state as tensors and plain numbers: no pickle."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import get_scheduler

Schedule = Literal["constant", "constant_with_warmup"]


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101).

    Attributes:
        learning_rate: after warm-up.
        betas: decay of the first and second moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        lr_scheduler: name of a transformers schedule that does not depend on the length of the run.
        warmup_steps: optimizer steps from zero to the learning rate.
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_scheduler: Schedule = "constant"
    warmup_steps: int = 0


class PolicyOptimizer:
    """The optimizer of one policy, from step to step and from iteration to iteration."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, *, steps: int = 0) -> None:
        """Start at a step.

        Args:
            parameters: what is trained, by name, in a fixed order.
            settings: of AdamW and its schedule.
            steps: optimizer steps already made; the schedule goes on from there.
        """
        self.parameters = dict(parameters)
        self.steps = steps
        self.adamw = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._schedule = get_scheduler(
            settings.lr_scheduler, self.adamw, num_warmup_steps=settings.warmup_steps, num_training_steps=None
        )
        if steps:
            self._schedule.last_epoch = steps
            for group, rate in zip(self.adamw.param_groups, self._rates_at(steps), strict=True):
                group["lr"] = rate

    def _rates_at(self, step: int) -> list[float]:
        pairs = zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        return [float(base * multiplier(step)) for base, multiplier in pairs]

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self.adamw.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.adamw.zero_grad(set_to_none=True)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients to a total norm of at most max_norm; returns the norm before."""
        return float(torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), max_norm))

    def step(self) -> None:
        """One optimizer step and one step of the schedule."""
        self.adamw.step()
        self._schedule.step()
        self.steps += 1

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts, `<parameter>|<moment>`, copied to the CPU."""
        return {
            f"{name}|{key}": value.detach().to("cpu", copy=True).contiguous()
            for name, parameter in self.parameters.items()
            for key, value in sorted(self.adamw.state.get(parameter, {}).items())
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take moments written by `state`.

        Raises:
            ValueError: the state is of other parameters, of other shapes, or in part missing; none of it is taken.
        """
        loaded = self._moments_of(state)
        if self.steps and not loaded:
            raise ValueError(f"the optimizer state is empty, but {self.steps} steps were made with it")
        for name, moments in loaded.items():
            parameter = self.parameters[name]
            # AdamW keeps its step counters on the CPU.
            self.adamw.state[parameter] = {
                key: value.to("cpu" if key == "step" else parameter.device, copy=True) for key, value in moments.items()
            }

    def _moments_of(self, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        loaded: dict[str, dict[str, Tensor]] = {}
        for entry, value in state.items():
            name, _, key = entry.rpartition("|")
            if name not in self.parameters:
                raise ValueError(f"the optimizer state holds {name!r}, which this policy does not train")
            loaded.setdefault(name, {})[key] = value
        for name, moments in loaded.items():
            shape = self.parameters[name].shape
            expected = {"step": torch.Size([]), "exp_avg": shape, "exp_avg_sq": shape}
            found = {key: value.shape for key, value in moments.items()}
            if found != expected:
                raise ValueError(f"the optimizer state of {name!r} holds {found}, not {expected}")
        return loaded
