"""What a configuration may say. Each section is what one stage sees; a stage's cache key sees its own alone."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from configs.placement_sections import PlacementSection, StorageSection
from configs.reward_sections import RewardSection, WatchSection
from configs.section import Decay, Digits, Name, NonNegativeFloat, Positive, Section
from grpo_core.advantages.settings import Aggregation, Baseline, Scale
from grpo_core.losses import LOSSES, ImportanceLevel, KlEstimator, MismatchMode
from grpo_core.optimizer import OptimizerKind, Schedule
from grpo_core.policies.trained import Reference
from grpo_core.rewards.mix.combine import MissingRewards


class RunSection(Section):
    """The run as a whole."""

    name: Name = Field(description="folder of the run under storage.root")
    seed: int = Field(0, ge=0, description="every random number of the run is derived from it")
    iterations: Digits = Field(description="policy updates to make; may be raised later to go on")
    staleness: int = Field(
        0, ge=0, description="rollouts are sampled by a policy this many versions older, while updates run; 0: in turn"
    )


class LoraSection(Section):
    """Low-rank adapters over the frozen model."""

    rank: Digits = 32
    alpha: Positive = 64.0
    targets: str | None = Field(None, description="regular expression over layer names; null: the policy's own choice")


class PolicySection(Section):
    """The model that is trained."""

    kind: Literal["glm_image", "causal_lm"] = Field("glm_image", description="which policy serves it")
    model: str = Field(min_length=1, description="folder of a saved model, or a hub name")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    autocast: Literal["bfloat16"] | None = Field(
        None, description="compute in 16 bits over float32 weights, while sampling and while training"
    )
    lora: LoraSection | None = Field(LoraSection(), description="null trains every weight that is not frozen")
    frozen: str | None = Field(None, description="regular expression: parameters left alone when lora is null")
    gradient_checkpointing: bool = Field(False, description="less memory in the update, one more forward pass")


class DatasetSection(Section):
    """One prompt file among several."""

    name: Name = Field(description="kept with every rollout; rewards may be limited to datasets by name")
    prompts: str = Field(min_length=1, description=".txt, .jsonl, .json, .csv, .tsv or .parquet")
    prompt_column: str | None = None
    limit: Digits | None = Field(None, description="take the first so many prompts")
    targets: str | None = Field(None, description="folder of target images, paired by index or by target_column")
    target_column: str | None = None
    weight: Positive = Field(1.0, description="share of an iteration's prompts, against the other datasets")


class PromptsSection(Section):
    """One prompt file, or several with names and weights."""

    prompts: str | None = Field(None, min_length=1, description=".txt, .jsonl, .json, .csv, .tsv or .parquet")
    prompt_column: str | None = None
    limit: Digits | None = Field(None, description="take the first so many prompts")
    targets: str | None = Field(None, description="folder of target images, paired by index or by target_column")
    target_column: str | None = None
    datasets: tuple[DatasetSection, ...] = Field((), description="in place of the fields above")

    @property
    def sets(self) -> tuple[DatasetSection, ...]:
        """The prompt files; one alone has the name `default`."""
        if self.datasets or self.prompts is None:
            return self.datasets
        return (
            DatasetSection(
                name="default",
                prompts=self.prompts,
                prompt_column=self.prompt_column,
                limit=self.limit,
                targets=self.targets,
                target_column=self.target_column,
            ),
        )


class CurriculumSection(Section):
    """Which prompts an iteration draws."""

    kind: Literal["uniform", "difficulty"] = Field("uniform", description="every prompt equally often, or by reward")
    target: float = Field(0.5, description="mean group reward that teaches most; prompts near it are drawn more often")
    width: Positive = Field(0.25, description="how far from the target a prompt's mean still counts")
    floor: float = Field(0.1, gt=0, le=1, description="weight of the least wanted prompt against the most wanted")
    window: Digits = Field(20, description="iterations back that count")


class DataSection(PromptsSection):
    """Prompts, and the images they ought to give."""

    curriculum: CurriculumSection = CurriculumSection()


class RolloutSection(Section):
    """How groups are sampled, whatever the policy draws or writes."""

    prompts_per_iteration: Digits = 8
    group_size: int = Field(8, ge=2, description="samples a prompt; advantages compare siblings, so at least 2")
    prompts_per_batch: Digits = Field(4, description="prompts sampled at once")
    temperature: Positive = 1.0
    top_p: float = Field(1.0, gt=0, le=1, description="1: off; the ids that could be drawn are stored")
    top_k: int = Field(0, ge=0, description="0: off; the ids that could be drawn are stored")
    min_p: float = Field(0.0, ge=0, lt=1, description="0: off; the ids that could be drawn are stored")


class ImageRolloutSection(RolloutSection):
    """How groups of images are drawn."""

    height: Digits
    width: Digits
    num_inference_steps: Digits = Field(50, description="denoising steps of the decoder")
    guidance_scale: NonNegativeFloat = 1.5
    decode_batch_size: Digits = 16
    shared_noise: bool = Field(True, description="siblings share the decoder's noise, so that they differ by tokens")


class TextRolloutSection(RolloutSection):
    """How groups of texts are written."""

    max_completion_length: Digits = Field(256, description="tokens, at most")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="texts that end a completion")
    system_prompt: str | None = None
    chat_template: bool | None = Field(None, description="null: when the tokenizer has one")


class AdvantagesSection(Section):
    """How rewards become advantages."""

    baseline: Baseline = Field("mean", description="of the group, or of the others (RLOO)")
    scale: Scale = Field("group", description="whose std divides; none is Dr. GRPO")
    aggregation: Aggregation = Field(
        "sum_then_normalize", description="normalize_then_sum normalises each reward by itself first (GDPO)"
    )
    eps: NonNegativeFloat = 1e-4
    clip: Positive | None = Field(None, description="largest |advantage|")
    missing: MissingRewards = Field("group_mean", description="what stands in where a reward is null for some siblings")
    constant_groups: Literal["keep", "drop", "redraw"] = Field(
        "keep", description="without spread: kept with advantage 0, left out, or replaced by other prompts (DAPO)"
    )
    max_rounds: Digits = Field(4, description="collections an iteration, at most, with constant_groups: redraw")
    kl_coef: NonNegativeFloat = Field(0.0, description="weight of the KL to the reference inside the reward")
    kl_estimator: KlEstimator = "k1"


class ParitySection(Section):
    """Largest allowed difference of stored and recomputed log-probs, in nats."""

    max_difference: Positive | None = Field(None, description="null: by dtype, 1e-3 in float32 and 1.0 in 16 bits")
    mean_difference: Positive | None = Field(None, description="null: by dtype, 1e-4 in float32 and 0.05 in 16 bits")


class MismatchSection(Section):
    """Correction by exp(old - rollout) where the sampler is not the policy that is trained (TIS, IcePop)."""

    mode: MismatchMode = "none"
    level: ImportanceLevel = "token"
    cap: float = Field(3.0, ge=1)
    floor: float = Field(0.0, ge=0, le=1)


class ReferenceSection(Section):
    """The policy that the KL is measured against."""

    placement: Literal["auto"] | Reference = Field(
        "auto", description="a copy on the device or in CPU memory when every weight is trained; auto: when needed"
    )
    refresh_every: int = Field(0, ge=0, description="iterations between refreshes; 0: never")
    mix: float = Field(0.6, gt=0, le=1, description="share of the policy in a refreshed reference; the rest stays")


class UpdateSection(Section):
    """How stored rollouts change the policy."""

    optimizer: OptimizerKind = "adamw"
    learning_rate: float = Field(1e-5, gt=0, le=1e3)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    lr_scheduler: Schedule = "constant"
    lr_scheduler_kwargs: dict[str, float | int | str | bool] = Field(default_factory=dict)
    warmup_steps: int = Field(0, ge=0, description="optimizer steps")
    total_steps: Digits | None = Field(None, description="length of the schedule; null: of run.iterations iterations")
    epochs: Digits = Field(1, description="passes over an iteration's rows")
    minibatch_size: Digits | None = Field(None, description="rows an optimizer step; null: all rows of an iteration")
    micro_batch_size: Digits = Field(8, description="rows a forward and backward pass; no effect on the gradient")
    loss: str = Field("grpo", description=f"{', '.join(LOSSES)}, or your own function as package.module:function")
    importance_level: ImportanceLevel | None = Field(None, description="null: as the loss has it")
    clip_range: float = Field(0.2, gt=0, lt=1)
    clip_range_high: Positive | None = Field(None, description="null: the same as clip_range")
    delta: Positive | None = Field(None, description="cap on the ratio of the unclipped branch")
    ratio_cap: Positive = Field(5.0, description="cispo's cap on the ratio")
    sapo_temperature_pos: Positive = 1.0
    sapo_temperature_neg: Positive = 1.05
    vespo_k_pos: Positive = 2.0
    vespo_lambda_pos: Positive = 3.0
    vespo_k_neg: Positive = 3.0
    vespo_lambda_neg: Positive = 2.0
    kl_coef: NonNegativeFloat = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_importance_correction: bool = Field(
        True, description="multiply the KL by the importance ratio: its gradient is then that of the KL itself"
    )
    entropy_coef: NonNegativeFloat = Field(0.0, description="weight of the entropy bonus")
    entropy_quantile: float = Field(1.0, gt=0, le=1, description="share of tokens, of highest entropy, that train")
    mask_truncated: bool = Field(False, description="rows cut at their greatest length stay out of the loss")
    mismatch: MismatchSection = MismatchSection()
    off_policy_threshold: Positive | None = Field(
        None, description="nats: rows with A < 0 whose policy moved further are left out (OPSM)"
    )
    max_grad_norm: Positive = 1.0
    reference: ReferenceSection = ReferenceSection()
    parity: ParitySection = ParitySection()


class EvaluateSection(PromptsSection):
    """Held-out prompts, drawn with fixed seeds before, during and after training."""

    every: int = Field(0, ge=0, description="iterations between evaluations; 0: before and after only")
    samples_per_prompt: Digits = 4
    seed: int = Field(0, ge=0, description="of the held-out samples; the same for every training seed")


class RunConfig(Section):
    """One training run."""

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
        """Samples an iteration trains on."""
        return self.rollout.prompts_per_iteration * self.rollout.group_size


class ImageRunConfig(RunConfig):
    """A run whose policy draws."""

    rollout: ImageRolloutSection


class TextRunConfig(RunConfig):
    """A run whose policy writes."""

    rollout: TextRolloutSection


RUN_CONFIGS: Mapping[str, type[RunConfig]] = MappingProxyType({"glm_image": ImageRunConfig, "causal_lm": TextRunConfig})
"""By policy.kind."""
