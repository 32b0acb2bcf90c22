"""The complete configuration of a training run, of a replay and of a file of rewards, and what identifies a run."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, create_model

from configs.scoring import RewardSection, WatchSection
from configs.sections import (
    DataSection,
    DatasetSection,
    DiffusersRolloutSection,
    EvaluateSection,
    GlmImageRolloutSection,
    PlacementSection,
    PolicySection,
    PromptsSection,
    RolloutSection,
    RunSection,
    StorageSection,
    TextRolloutSection,
)
from configs.training import (
    AdvantagesSection,
    AnyUpdateSection,
    BothUpdateSection,
    DenoisingUpdateSection,
    JointNftUpdateSection,
    JointUpdateSection,
    MismatchSection,
    NftUpdateSection,
    UpdateSection,
)
from configs.validation import Name, Section
from grpo_core.errors import InputError
from grpo_core.optimizer.settings import WITH_LENGTH
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.policies.trained.choice import Reference
from grpo_core.streams import COMPARED, Stream


class RunConfig(Section):
    """The configuration of a training run."""

    run: RunSection
    policy: PolicySection
    data: DataSection
    rollout: RolloutSection
    rewards: tuple[RewardSection, ...] = Field(min_length=1)
    advantages: AdvantagesSection = AdvantagesSection()
    update: AnyUpdateSection = UpdateSection()
    evaluate: EvaluateSection = EvaluateSection()
    watch: WatchSection = WatchSection()
    placement: PlacementSection = PlacementSection()
    storage: StorageSection = StorageSection()

    @property
    def prompt_sections(self) -> Mapping[str, PromptsSection]:
        """The sections with prompts, by name: training and held-out."""
        return {"data": self.data, "evaluate": self.evaluate}

    @property
    def datasets(self) -> list[tuple[str, DatasetSection]]:
        """Every training and held-out prompt file with its place."""
        return [each for place, section in self.prompt_sections.items() for each in section.placed(place)]

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that are trained, in the order of STREAMS."""
        return self.policy.streams

    @property
    def renderings_of_drafts(self) -> tuple[int, ...]:
        """How often each draft of a training prompt is rendered."""
        return self.rollout.renderings_of_drafts(self.streams)

    @property
    def samples_per_iteration(self) -> int:
        """Number of images or texts that an iteration samples."""
        return self.rollout.prompts_per_iteration * sum(self.renderings_of_drafts)

    def groups_per_prompt(self, stream: Stream) -> int:
        """Return the number of a prompt's groups of siblings: its drafts, or the renderings of each of some drafts."""
        several = sum(times > 1 for times in self.renderings_of_drafts)
        return {"draft": 1, "rendering": several}[COMPARED[stream]]

    def rows_of(self, stream: Stream) -> int:
        """Return the number of rows of a stream that an iteration trains on: all that are compared with others."""
        renderings = self.renderings_of_drafts
        drafts, several = len(renderings), sum(times for times in renderings if times > 1)
        return self.rollout.prompts_per_iteration * {"draft": drafts, "rendering": several}[COMPARED[stream]]

    def is_evaluated(self, iteration: int) -> bool:
        """Return whether the policy that this iteration makes is evaluated on the held-out prompts."""
        every = self.evaluate.every
        return iteration == self.run.iterations or (every > 0 and iteration % every == 0)

    def window_start(self, iteration: int) -> int | None:
        """Return the index of an iteration's first noisy denoising step; None if no denoising is trained.

        Raises:
            InputError: as DenoisingSettings.check_window.
        """
        if "denoising" not in self.streams or not isinstance(self.rollout, DenoisingSettings):
            return None
        return self.rollout.window_start(iteration, self.run.seed)

    @property
    def evaluation_rollout(self) -> RolloutSection:
        """The settings of held-out samples."""
        return self.rollout.for_evaluation(self.evaluate)

    @property
    def updates(self) -> Mapping[Stream, AnyUpdateSection]:
        """The update of each trained stream's component, in the order of STREAMS."""
        return {self.streams[0]: self.update}

    @property
    def update_places(self) -> Mapping[Stream, str]:
        """Where the update of each trained stream is configured, for messages."""
        return {self.streams[0]: "update"}

    def at_update(self, stream: Stream, error: InputError) -> InputError:
        """Return an error of a section `update` with its place in the section of that stream's update."""
        inner = error.place.removeprefix("update.")
        place = error.place if inner == error.place else f"{self.update_places[stream]}.{inner}"
        return InputError(place, error.value, error.hint)

    @property
    def references(self) -> Mapping[Stream, Reference]:
        """Where the reference's weights of each component are kept; `none` if no KL uses it."""
        return {stream: self._reference_of(update) for stream, update in self.updates.items()}

    def _reference_of(self, update: AnyUpdateSection) -> Reference:
        chosen = update.reference.placement
        if chosen != "auto":
            return chosen
        return "device" if update.kl_coef > 0 or self.advantages.kl_coef > 0 else "none"

    @property
    def scheduled_updates(self) -> Mapping[Stream, AnyUpdateSection]:
        """The updates, with the length of their schedules filled in if they have one."""
        return {stream: self._scheduled(update, self.rows_of(stream)) for stream, update in self.updates.items()}

    def _scheduled(self, update: AnyUpdateSection, rows: int) -> AnyUpdateSection:
        if update.total_steps is not None or update.lr_scheduler not in WITH_LENGTH:
            return update
        steps_per_epoch = -(-rows // (update.minibatch_size or rows or 1))
        return update.model_copy(update={"total_steps": self.run.iterations * update.epochs * steps_per_epoch})


class GlmImageRunConfig(RunConfig):
    """A run that trains GLM-Image's token model."""

    rollout: GlmImageRolloutSection
    update: UpdateSection = UpdateSection()


class DecoderRunConfig(GlmImageRunConfig):
    """A run that trains GLM-Image's decoder."""

    update: DenoisingUpdateSection = DenoisingUpdateSection()


class BothRunConfig(GlmImageRunConfig):
    """A run that trains both parts of GLM-Image."""

    update: BothUpdateSection

    @property
    def updates(self) -> Mapping[Stream, AnyUpdateSection]:
        """The update of each part."""
        return {"tokens": self.update.tokens, "denoising": self.update.denoising}

    @property
    def update_places(self) -> Mapping[Stream, str]:
        """Where they are configured."""
        return {"tokens": "update", "denoising": "update.denoising"}


class JointRunConfig(BothRunConfig):
    """A run that trains both parts of GLM-Image by importance ratios."""

    update: JointUpdateSection = JointUpdateSection()


class JointNftRunConfig(BothRunConfig):
    """A run that trains GLM-Image's token model by importance ratios, and its decoder by DiffusionNFT."""

    update: JointNftUpdateSection


class DiffusersRunConfig(RunConfig):
    """A run that trains the denoising of a pipeline of diffusers."""

    rollout: DiffusersRolloutSection
    update: DenoisingUpdateSection = DenoisingUpdateSection()


class DecoderNftRunConfig(RunConfig):
    """A run that trains GLM-Image's decoder by DiffusionNFT."""

    rollout: GlmImageRolloutSection
    update: NftUpdateSection


class DiffusersNftRunConfig(RunConfig):
    """A run that trains the denoising of a pipeline of diffusers by DiffusionNFT."""

    rollout: DiffusersRolloutSection
    update: NftUpdateSection


class TextRunConfig(RunConfig):
    """A run whose policy writes text."""

    rollout: TextRolloutSection
    update: UpdateSection = UpdateSection()


RUN_CONFIGS: Mapping[tuple[str, tuple[Stream, ...], str], type[RunConfig]] = MappingProxyType(
    {
        ("glm_image", ("tokens",), "grpo"): GlmImageRunConfig,
        ("glm_image", ("denoising",), "grpo"): DecoderRunConfig,
        ("glm_image", ("denoising",), "nft"): DecoderNftRunConfig,
        ("glm_image", ("tokens", "denoising"), "grpo"): JointRunConfig,
        ("glm_image", ("tokens", "denoising"), "nft"): JointNftRunConfig,
        ("diffusers", ("denoising",), "grpo"): DiffusersRunConfig,
        ("diffusers", ("denoising",), "nft"): DiffusersNftRunConfig,
        ("causal_lm", ("tokens",), "grpo"): TextRunConfig,
    }
)
"""Configuration class by policy.kind, the streams of policy.train, and the algorithm, of both parts the decoder's."""

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


class ReplayConfig(RunConfig):
    """The configuration of a replay."""

    replay: ReplaySection


def corrected(
    updates: Mapping[Stream, AnyUpdateSection], correction: MismatchSection
) -> Mapping[Stream, AnyUpdateSection]:
    """Return the updates with this correction, except those that have one already, or none by their algorithm."""
    return {stream: update.corrected(correction) for stream, update in updates.items()}


def as_replay(config: RunConfig, replay: ReplaySection) -> ReplayConfig:
    """Return the configuration of a run as that of a replay."""
    run = type(config)
    model = create_model(f"Replayed{run.__name__}", __base__=(run, ReplayConfig))
    replayed = model.model_validate({**config.model_dump(), "replay": replay.model_dump()})
    assert isinstance(replayed, ReplayConfig), "its second base"
    return replayed


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
    bound = any(update.total_steps is None and update.lr_scheduler in WITH_LENGTH for update in config.updates.values())
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
