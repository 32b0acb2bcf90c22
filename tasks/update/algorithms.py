"""How each algorithm trains a component on stored rows, and what is stored of its optimizer steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from configs.training import ParitySection
from grpo_core.optimizer import PolicyOptimizer
from grpo_core.records import TrainingRows
from grpo_core.streams import Stream
from grpo_core.update import (
    NftStepMetrics,
    ProcessGroup,
    RatioStepMetrics,
    StepMetrics,
    UpdateResult,
    update_by_nft,
    update_policy,
)
from tasks.storage.tables.schemas import NFT_STEPS, UPDATE_STEPS


@dataclass(frozen=True)
class Training:
    """What an update of a component needs.

    Attributes:
        stream: of the component's actions.
        component: of the policy; an algorithm needs more of it than others.
        optimizer: of the component's parameters.
        rows: of the stream.
        settings: the algorithm's own section of the configuration.
        seed: decides the order of the rows, and what else the algorithm draws.
        in_fp32: whether the model computes in fp32; decides the defaults of a parity gate.
        process_group: the processes that share the update.
        on_progress: called with passes done and the total.
    """

    stream: Stream
    component: Any
    optimizer: PolicyOptimizer
    rows: TrainingRows
    settings: Any
    seed: int
    in_fp32: bool
    process_group: ProcessGroup
    on_progress: Callable[[int, int], None] | None


@dataclass(frozen=True)
class Algorithm:
    """One way to train on stored rows.

    Attributes:
        update: trains the component.
        metrics: what it measures of an optimizer step.
        steps_schema: of the table with these, one row per step.
    """

    update: Callable[[Training], UpdateResult]
    metrics: type[StepMetrics]
    steps_schema: pa.Schema


def _by_ratios(training: Training) -> UpdateResult:
    parity: ParitySection = training.settings.parity
    summed = training.component.summed_values(training.rows.actions)
    return update_policy(
        training.component,
        training.optimizer,
        training.rows,
        training.settings,
        seed=training.seed,
        parity=parity.tolerance(training.stream, in_fp32=training.in_fp32, summed_values=summed),
        process_group=training.process_group,
        on_progress=training.on_progress,
    )


def _by_nft(training: Training) -> UpdateResult:
    return update_by_nft(
        training.component,
        training.optimizer,
        training.rows,
        training.settings,
        seed=training.seed,
        process_group=training.process_group,
        on_progress=training.on_progress,
    )


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "grpo": Algorithm(_by_ratios, RatioStepMetrics, UPDATE_STEPS),
        "nft": Algorithm(_by_nft, NftStepMetrics, NFT_STEPS),
    }
)
"""By the name in update.algorithm."""
