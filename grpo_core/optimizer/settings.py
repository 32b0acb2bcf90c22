"""The options of the optimizer and of its schedule."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from grpo_core.optimizer.kinds import OptimizerKind
from grpo_core.optimizer.schedule import LearningRateSchedule, Schedule, ScheduleValue
from grpo_core.settings import check_fields

Decay = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101).

    Attributes:
        learning_rate: after warm-up.
        betas: decay of the first and second moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        lr_scheduler: name of a transformers schedule.
        warmup_steps: optimizer steps from zero to the learning rate.
        optimizer: how the moments are kept. `adamw`: in the parameters' dtype. `adamw_8bit`: in 8 bits, block by block
            (Dettmers et al., 2022, arXiv:2110.02861), and in fp32 where a parameter has fewer than 4096 elements.
            `paged_adamw` (in fp32), `paged_adamw_8bit`: in memory that CUDA moves to the host when the GPU's runs out.
        total_steps: length of the schedule in optimizer steps, warm-up included; ignored by schedules without one.
        lr_scheduler_kwargs: further arguments of the schedule's function in transformers.

    Raises:
        InputError: a schedule that cannot be computed with these values.
    """

    learning_rate: NonNegativeFloat
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    lr_scheduler: Schedule = "constant"
    warmup_steps: NonNegativeInt = 0
    optimizer: OptimizerKind = "adamw"
    total_steps: PositiveInt | None = None
    lr_scheduler_kwargs: Mapping[str, ScheduleValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "update")
        self.schedule()

    def schedule(self) -> LearningRateSchedule:
        """The learning rate of each step."""
        return LearningRateSchedule(
            self.lr_scheduler,
            self.learning_rate,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
            kwargs=self.lr_scheduler_kwargs,
        )
