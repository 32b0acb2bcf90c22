"""The complete configuration of a training run, of a replay and of a file of rewards, and what identifies a run."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from configs.scoring import RewardSection, WatchSection
from configs.sections import (
    DataSection,
    EvaluateSection,
    ImageRolloutSection,
    PlacementSection,
    PolicySection,
    RunSection,
    StorageSection,
    TextRolloutSection,
)
from configs.training import AdvantagesSection, MismatchSection, UpdateSection
from configs.validation import Name, Section
from grpo_core.optimizer.settings import WITH_LENGTH
from grpo_core.policies.trained.choice import Reference


class RunConfig(Section):
    """The configuration of a training run."""

    run: RunSection
    policy: PolicySection
    data: DataSection
    rollout: ImageRolloutSection | TextRolloutSection
    rewards: tuple[RewardSection, ...] = Field(min_length=1)
    advantages: AdvantagesSection = AdvantagesSection()
    update: UpdateSection = UpdateSection()
    evaluate: EvaluateSection = EvaluateSection()
    watch: WatchSection = WatchSection()
    placement: PlacementSection = PlacementSection()
    storage: StorageSection = StorageSection()

    @property
    def rows_per_iteration(self) -> int:
        """Number of samples that an iteration trains on."""
        return self.rollout.prompts_per_iteration * self.rollout.group_size

    @property
    def reference_placement(self) -> Reference:
        """Where the reference's weights are kept; `none` if no KL uses it."""
        chosen = self.update.reference.placement
        if chosen != "auto":
            return chosen
        return "device" if self.update.kl_coef > 0 or self.advantages.kl_coef > 0 else "none"

    @property
    def scheduled_update(self) -> UpdateSection:
        """The update section, with the schedule's length filled in if it has one."""
        update = self.update
        if update.total_steps is not None or update.lr_scheduler not in WITH_LENGTH:
            return update
        steps_per_epoch = -(-self.rows_per_iteration // (update.minibatch_size or self.rows_per_iteration))
        return update.model_copy(update={"total_steps": self.run.iterations * update.epochs * steps_per_epoch})


class ImageRunConfig(RunConfig):
    """A run whose policy generates images."""

    rollout: ImageRolloutSection


class TextRunConfig(RunConfig):
    """A run whose policy writes text."""

    rollout: TextRolloutSection


RUN_CONFIGS: Mapping[str, type[RunConfig]] = MappingProxyType({"glm_image": ImageRunConfig, "causal_lm": TextRunConfig})
"""Configuration class by policy.kind."""

CORRECTION = MismatchSection.model_validate({"mode": "truncate", "level": "token", "cap": 3.0})
"""Default correction in a replay for rows that other weights sampled."""


class ReplaySection(Section):
    """The source of a replay: another run's rollouts and policy."""

    source: str = Field(min_length=1, description="run whose rollouts are used, under the same storage.root")
    policy: NonNegativeInt = Field(0, description="version of the source that is trained on; 0: the original model")
    iterations: tuple[PositiveInt, ...] = Field(min_length=1, description="its iterations, in order; one update each")
    advantages: Name = Field("stored", description="stored, recomputed, or the name of a rescoring of the source")
    max_staleness: NonNegativeInt = Field(description="maximum versions between a row's policy and the trained one")
    correction: MismatchSection = Field(
        CORRECTION, description="for rows that other weights sampled, if update.mismatch.mode is none"
    )


class ImageReplayConfig(ImageRunConfig):
    """A replay whose policy generates images."""

    replay: ReplaySection


class TextReplayConfig(TextRunConfig):
    """A replay whose policy writes text."""

    replay: ReplaySection


ReplayConfig = ImageReplayConfig | TextReplayConfig


def corrected(update: UpdateSection, correction: MismatchSection) -> UpdateSection:
    """Return the update with this correction, unless it has a correction already."""
    return update if update.mismatch.mode != "none" else update.model_copy(update={"mismatch": correction})


def as_replay(config: RunConfig, replay: ReplaySection) -> ReplayConfig:
    """Return the configuration of a run as that of a replay."""
    model = ImageReplayConfig if isinstance(config, ImageRunConfig) else TextReplayConfig
    return model.model_validate({**config.model_dump(), "replay": replay.model_dump()})


class RewardsFile(Section):
    """Rewards, and how they become advantages: to rescore stored rollouts, and for a reward server."""

    rewards: tuple[RewardSection, ...] = Field(min_length=1)
    advantages: AdvantagesSection | None = Field(None, description="null: as the rollouts were trained with")


_STAGES = ("policy", "data", "rollout", "advantages", "update")


def run_identity(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine the policies and rollouts of a run, as JSON values.

    Memory, placement, storage, evaluation and guardrails are left out, and so is the number of iterations, unless the
    learning rate schedule depends on it: otherwise more iterations only continue the run.
    """
    run = config.run
    bound = config.update.total_steps is None and config.update.lr_scheduler in WITH_LENGTH
    return {
        **{name: getattr(config, name).result_settings() for name in _STAGES},
        "run": {"seed": run.seed, "staleness": run.staleness, **({"iterations": run.iterations} if bound else {})},
        # Keyed by label, so that a reported change names the reward.
        "rewards": {section.label: section.result_settings() for section in config.rewards},
    }


def changed_settings(previous: Mapping[str, Any], current: Mapping[str, Any], path: str = "") -> Sequence[str]:
    """Return `section.key was -> is` for every value that differs."""
    changes: list[str] = []
    for key in sorted({*previous, *current}):
        was, now = previous.get(key), current.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            changes += changed_settings(was, now, f"{path}{key}.")
        elif was != now:
            changes.append(f"{path}{key} {was} -> {now}")
    return changes
