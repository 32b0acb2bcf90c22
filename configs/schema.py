"""The complete configuration of a training run, of a replay and of a file of rewards, and what identifies a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, ValidationInfo, model_validator

from configs.placement import PlacementSection, StorageSection
from configs.prompts import DataSection, DatasetSection, EvaluateSection, PromptsSection
from configs.rollouts import (
    DiffusersRolloutSection,
    GlmImageRolloutSection,
    RolloutSection,
    TextRolloutSection,
    VisionRolloutSection,
)
from configs.scoring import AdvantagesSection, GuardrailsSection, RewardSection
from configs.sections import Kind, PolicySection, RunSection, kind_of
from configs.training import (
    ALGORITHMS,
    GRPO,
    AnyDenoisingUpdate,
    AnyUpdateSection,
    MismatchSection,
    StreamUpdatesSection,
    UpdateSection,
    read_update,
    update_section,
)
from configs.validation import Choice, Name, Section
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.settings import Reference
from grpo_core.rollouts.streams import STREAMS, Stream
from grpo_core.update.settings import WITH_LENGTH
from grpo_core.update.velocity_settings import VelocitySettings
from grpo_core.uses import Uses

ROLLOUTS: Mapping[Kind, type[RolloutSection]] = {
    "glm_image": GlmImageRolloutSection,
    "diffusers": DiffusersRolloutSection,
    "causal_lm": TextRolloutSection,
    "vision_lm": VisionRolloutSection,
}
"""The section `rollout` by policy.kind."""


@dataclass(frozen=True)
class _Given:
    """A section as it was given, whose keys depend on what the policy is."""

    kind: Kind
    streams: tuple[Stream, ...]
    values: Any

    @classmethod
    def of(cls, policy: Any, values: Any) -> "_Given":
        """Describe a section next to that of the policy; what a policy cannot train is refused there."""
        if isinstance(policy, PolicySection):
            return cls(policy.kind, policy.streams, values)
        given = policy if isinstance(policy, Mapping) else {}
        kind = kind_of(policy)
        known = policy_family(kind).streams
        train = given.get("train", known[:1])
        streams = tuple(stream for stream in STREAMS if isinstance(train, list | tuple) and stream in train)
        if not streams or not set(streams) <= set(known):
            named = values if isinstance(values, Mapping) else {}
            streams = tuple(stream for stream in known if stream in named) or known[:1]
        return cls(kind, streams, values)

    @property
    def only(self) -> Stream | None:
        """The trained stream whose settings are those of `update` itself; None where they are by stream."""
        by_stream = isinstance(self.values, Mapping) and self.values.keys() == {self.streams[0]}
        return None if by_stream or len(self.streams) > 1 else self.streams[0]


def _read_rollout(given: Any, info: ValidationInfo) -> Any:
    if not isinstance(given, _Given):
        return given
    return ROLLOUTS[given.kind].model_validate(given.values, context=info.context)


def _read_update(given: Any, info: ValidationInfo) -> Any:
    if not isinstance(given, _Given):
        return given
    if given.only is not None:
        return read_update(given.only, given.values, info.context)
    both = StreamUpdatesSection.model_validate(given.values, context=info.context)
    return both if len(given.streams) > 1 else getattr(both, given.streams[0])


AnyRollout = Annotated[RolloutSection, BeforeValidator(_read_rollout)]
"""The section `rollout` of a configuration by its policy."""


class ByPolicy(Section):
    """Base of configurations whose sections `rollout` and `update` have the keys of what their `policy` is."""

    @model_validator(mode="before")
    @classmethod
    def _by_the_policy(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = {name: values[name] for name in ("rollout", "update") if name in values}
        return {**values, **{name: _Given.of(values.get("policy"), each) for name, each in given.items()}}

    @classmethod
    def choices(cls, values: Mapping[str, Any]) -> Mapping[str, Choice]:
        """Return what chooses the keys of `rollout`, and those of each update."""
        given = _Given.of(values.get("policy"), values.get("update", {}))
        chosen = {"rollout": Choice("policy.kind", given.kind, ROLLOUTS, ROLLOUTS[given.kind])}
        updates: dict[str, tuple[Stream, Any]]
        if given.only is not None:
            updates = {"update": (given.only, given.values)}
        else:
            chosen["update"] = Choice("policy.train", "", {}, StreamUpdatesSection)
            inner = given.values if isinstance(given.values, Mapping) else {}
            updates = {f"update.{stream}": (stream, inner.get(stream)) for stream in given.streams}
        for path, (stream, update) in updates.items():
            value = update.get("algorithm", GRPO) if isinstance(update, Mapping) else GRPO
            model = update_section(stream, update)
            chosen[path] = Choice(f"{path}.algorithm", str(value), ALGORITHMS[stream], model)
        return chosen


class RunConfig(ByPolicy):
    """The configuration of a training run.

    The keys of `rollout` depend on `policy.kind`. `update` has `tokens` and `denoising` where both are trained, and the
    settings themselves where one is.
    """

    run: RunSection
    policy: PolicySection
    data: DataSection
    rollout: AnyRollout
    rewards: tuple[RewardSection, ...] = Field(min_length=1)
    advantages: AdvantagesSection = AdvantagesSection()
    update: Annotated[UpdateSection | AnyDenoisingUpdate | StreamUpdatesSection, BeforeValidator(_read_update)] = (
        UpdateSection()
    )
    evaluate: EvaluateSection = EvaluateSection()
    guardrails: GuardrailsSection = GuardrailsSection()
    placement: PlacementSection = PlacementSection()
    storage: StorageSection = StorageSection()

    @model_validator(mode="before")
    @classmethod
    def _update_each_stream(cls, values: Any) -> Any:
        return {**values, "update": values.get("update", {})} if isinstance(values, Mapping) else values

    @model_validator(mode="before")
    @classmethod
    def _hold_out(cls, values: Any) -> Any:
        """Give an evaluation of a share the prompts that it is a share of."""
        sections = values if isinstance(values, Mapping) else {}
        data, evaluate = (
            dict(each) if isinstance(each := sections.get(n), Mapping) else {} for n in ("data", "evaluate")
        )
        if evaluate.get("share") is None or any(evaluate.get(name) for name in PromptsSection.model_fields):
            return values
        return {**sections, "evaluate": evaluate | {k: data[k] for k in PromptsSection.model_fields if k in data}}

    @property
    def first_version(self) -> int:
        """Number of the policy version that the run starts from."""
        return 0

    @property
    def prompt_sections(self) -> Mapping[str, PromptsSection]:
        """The sections with prompts, by name: training and held-out."""
        return {"data": self.data, "evaluate": self.evaluate}

    @property
    def datasets(self) -> list[tuple[str, DatasetSection]]:
        """Every training and held-out prompt file with its place."""
        return [each for place, section in self.prompt_sections.items() for each in section.placed(place)]

    @property
    def target_folders(self) -> tuple[str, ...]:
        """The folders of target images of every prompt file."""
        return tuple({each.target_folder: None for _, each in self.datasets})

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that are trained, in the order of STREAMS."""
        return self.policy.streams

    @property
    def images_of_samples(self) -> tuple[int, ...]:
        """How many images each token sample of a training prompt gets; a text counts as one."""
        return self.rollout.images_of_samples(self.streams)

    @property
    def counted_rewards(self) -> tuple[RewardSection, ...]:
        """The rewards that advantages are made of; the others are only measured."""
        return tuple(each for each in self.rewards if each.weight or each.role == "gate")

    @property
    def samples_per_iteration(self) -> int:
        """Number of images or texts that an iteration samples."""
        return self.rollout.prompts_per_iteration * sum(self.images_of_samples)

    def groups_per_prompt(self, stream: Stream) -> int:
        """Return the number of a prompt's groups of siblings: its token samples, or the images of each of some."""
        several = sum(times > 1 for times in self.images_of_samples)
        return {"tokens": 1, "denoising": several}[stream]

    def rows_of(self, stream: Stream) -> int:
        """Return the number of rows of a stream that an iteration trains on: all that are compared with others."""
        images = self.images_of_samples
        samples, several = len(images), sum(times for times in images if times > 1)
        return self.rollout.prompts_per_iteration * {"tokens": samples, "denoising": several}[stream]

    def is_evaluated(self, iteration: int) -> bool:
        """Return whether the policy that this iteration makes is evaluated on the held-out prompts."""
        every = self.evaluate.every
        return iteration == self.run.iterations or (every > 0 and iteration % every == 0)

    def window_start(self, iteration: int) -> int | None:
        """Return the index of an iteration's first noisy denoising step; None if no denoising is trained."""
        if "denoising" not in self.streams or not isinstance(self.rollout, DenoisingSettings):
            return None
        return self.rollout.window_start(iteration, self.run.seed)

    @property
    def rounds_apart(self) -> bool:
        """Whether an engine samples in 16 bits, whose kernels and batches round otherwise than the update's passes."""
        rollout = self.rollout
        if not isinstance(rollout, TextRolloutSection) or rollout.engine == "policy":
            return False
        return not self.policy.in_fp32 or (rollout.vllm is not None and rollout.vllm.dtype not in (None, "float32"))

    @property
    def evaluation_rollout(self) -> RolloutSection:
        """The settings of held-out samples."""
        return self.rollout.for_evaluation(self.evaluate)

    @property
    def updates(self) -> Mapping[Stream, AnyUpdateSection]:
        """The update of each trained stream's component, in the order of STREAMS."""
        if isinstance(self.update, StreamUpdatesSection):
            return {"tokens": self.update.tokens, "denoising": self.update.denoising}
        return {self.streams[0]: self.update}

    def update_path(self, stream: Stream) -> str:
        """Return where the update of a trained stream is configured, for messages."""
        return f"update.{stream}" if isinstance(self.update, StreamUpdatesSection) else "update"

    @property
    def cautions(self) -> tuple[str, ...]:
        """What a training with these settings has to expect, each with its place."""
        matched = {s: update for s, update in self.updates.items() if isinstance(update, VelocitySettings)}
        return tuple(f"{self.update_path(s)}.{caution}" for s, update in matched.items() for caution in update.cautions)

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
        steps_per_epoch = -(-rows // (update.rows_per_step(rows) or 1))
        return update.model_copy(update={"total_steps": self.run.iterations * update.epochs * steps_per_epoch})


CORRECTION = MismatchSection.model_validate({"mode": "truncate", "level": "token", "cap": 3.0})
"""Default correction in a replay for rows that other weights sampled."""


class ReplaySection(Section):
    """The source of a replay: another run's rollouts and policy."""

    source: Annotated[str, Uses.PLACE] = Field(
        min_length=1, description="run whose rollouts are used, under the same storage.root"
    )
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

    @property
    def first_version(self) -> int:
        """Number of the policy version that the run starts from: the source's."""
        return self.replay.policy


def corrected(
    updates: Mapping[Stream, AnyUpdateSection], correction: MismatchSection
) -> Mapping[Stream, AnyUpdateSection]:
    """Return the updates with this correction, except those that have one already, or none by their algorithm."""
    return {stream: update.corrected(correction) for stream, update in updates.items()}


def as_replay(config: RunConfig, replay: ReplaySection) -> ReplayConfig:
    """Return the configuration of a run as that of a replay."""
    return ReplayConfig(**{name: getattr(config, name) for name in RunConfig.model_fields}, replay=replay)


class RewardsFile(Section):
    """Rewards, and how they become advantages: to rescore stored rollouts, and for a reward server."""

    rewards: tuple[RewardSection, ...] = Field(min_length=1)
    advantages: AdvantagesSection | None = Field(None, description="null: as the rollouts were trained with")
