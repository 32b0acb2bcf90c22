"""What a configuration may say. Each section is what one stage sees; a stage's cache key sees its own alone."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Digits = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]


class Section(BaseModel):
    """Unknown keys and wrong types are refused; numbers are never read from strings, nor NaN from anything."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    """The run as a whole."""

    name: Name = Field(description="folder of the run under storage.root")
    seed: int = Field(0, ge=0, description="every random number of the run is derived from it")
    iterations: Digits = Field(description="policy updates to make; may be raised later to go on")


class LoraSection(Section):
    """Low-rank adapters over the frozen model."""

    rank: Digits = 32
    alpha: Positive = 64.0
    targets: str | None = Field(None, description="regular expression over layer names; null: the policy's own choice")


class PolicySection(Section):
    """The model that is trained."""

    model: str = Field(min_length=1, description="folder of a saved pipeline, or a hub name")
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    lora: LoraSection | None = Field(LoraSection(), description="null trains every weight of the language model")
    gradient_checkpointing: bool = Field(False, description="less memory in the update, one more forward pass")


class DataSection(Section):
    """Prompts, and the pictures they ought to give."""

    prompts: str = Field(min_length=1, description=".txt, .jsonl, .json, .csv, .tsv or .parquet")
    prompt_column: str | None = None
    limit: Digits | None = Field(None, description="take the first so many prompts")
    targets: str | None = Field(None, description="folder of target pictures, paired by index or by target_column")
    target_column: str | None = None


class RolloutSection(Section):
    """How groups of pictures are drawn."""

    prompts_per_iteration: Digits = 8
    group_size: int = Field(8, ge=2, description="pictures a prompt; advantages compare siblings, so at least 2")
    prompts_per_batch: Digits = Field(4, description="prompts sampled at once")
    height: Digits
    width: Digits
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(ge=1, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=0)] = 0
    num_inference_steps: Digits = Field(50, description="denoising steps of the decoder")
    guidance_scale: NotNegative = 1.5
    decode_batch_size: Digits = 16
    shared_noise: bool = Field(True, description="siblings share the decoder's noise, so that they differ by tokens")


class RewardSection(Section):
    """One reward of the mix."""

    reward: str = Field(min_length=1, description="registered name")
    name: Name | None = Field(None, description="name in tables and plots; by default the reward's")
    weight: float = 1.0
    settings: dict[str, object] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name in tables and plots."""
        return self.name or self.reward


class AdvantagesSection(Section):
    """How rewards become advantages."""

    scale: Literal["group", "none"] = Field("group", description="divide by the group's std, or not (Dr. GRPO)")
    eps: NotNegative = 1e-4


class ParitySection(Section):
    """Largest allowed difference of stored and recomputed log-probs, in nats."""

    max_difference: Positive | None = Field(None, description="null: by dtype, 1e-3 in float32 and 1.0 in 16 bits")
    mean_difference: Positive | None = Field(None, description="null: by dtype, 1e-4 in float32 and 0.05 in 16 bits")


class UpdateSection(Section):
    """How stored rollouts change the policy."""

    learning_rate: Positive = 1e-5
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    lr_scheduler: Literal["constant", "constant_with_warmup"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    epochs: Digits = 1
    minibatch_size: Digits | None = Field(None, description="rows an optimizer step; null: all rows of an iteration")
    micro_batch_size: Digits = Field(8, description="rows a forward and backward pass; no effect on the gradient")
    clip_range: float = Field(0.2, gt=0, lt=1)
    clip_range_high: Positive | None = Field(None, description="null: the same as clip_range")
    kl_coef: NotNegative = 0.0
    max_grad_norm: Positive = 1.0
    parity: ParitySection = ParitySection()


class EvaluateSection(Section):
    """Held-out prompts, drawn with fixed seeds before, during and after training."""

    prompts: str | None = Field(None, description="null: no held-out evaluation")
    prompt_column: str | None = None
    targets: str | None = None
    target_column: str | None = None
    limit: Digits | None = None
    every: int = Field(0, ge=0, description="iterations between evaluations; 0: before and after only")
    samples_per_prompt: Digits = 4
    seed: int = Field(0, ge=0, description="of the held-out pictures; the same for every training seed")


class PlacementSection(Section):
    """Where the work is done; of a result it changes the rounding of the last bits alone."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    torch_threads: Digits = Field(1, description="measure before raising: on a small shared machine one is fastest")


class StorageSection(Section):
    """Where runs are kept."""

    root: str = Field("runs", min_length=1, description="a folder or any fsspec URL")


class RunConfig(Section):
    """One training run."""

    run: RunSection
    policy: PolicySection
    data: DataSection
    rollout: RolloutSection
    rewards: tuple[RewardSection, ...] = Field(min_length=1)
    advantages: AdvantagesSection = AdvantagesSection()
    update: UpdateSection = UpdateSection()
    evaluate: EvaluateSection = EvaluateSection()
    placement: PlacementSection = PlacementSection()
    storage: StorageSection = StorageSection()

    @property
    def rows_per_iteration(self) -> int:
        """Pictures drawn an iteration."""
        return self.rollout.prompts_per_iteration * self.rollout.group_size
