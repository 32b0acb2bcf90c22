"""The sections of a configuration about prompts, rollouts, placement and storage.

A section that the core uses inherits the core's settings: fields, ranges and defaults are declared there, and the
section adds the fields that only a configuration has.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_args

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from configs.validation import Name, RunName, Section
from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from grpo_core.policies.engines.settings import EngineName, VllmSettings, refuse_truncation
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.pipeline_files import PolicyKind, read_kind
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.quantization import QuantizationSettings
from grpo_core.policies.trained.settings import LoraSettings
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.settings import ImageSettings
from grpo_core.streams import MAX_PIXELS, STREAMS, Stream
from grpo_core.uses import Uses


class KeepPoliciesSection(Section):
    """The policy versions that stay stored, each with its optimizer state; a training deletes the others."""

    last: PositiveInt = Field(2, description="this many at the end; more if run.staleness samples with more")
    every: PositiveInt | None = Field(None, description="versions N, 2N, ...; null: none of them")
    best: bool = Field(True, description="the version with the highest held-out reward so far")

    def count(self, iterations: int, staleness: int) -> int:
        """Return the maximum number of versions that are stored at once, with the one that is being written."""
        on_the_way = iterations // self.every if self.every else 0
        return min(iterations, max(self.last, staleness + 1) + 1 + on_the_way + self.best)


class RunSection(Section):
    """Name, seed and length of the run."""

    name: RunName = Field(description="folder of the run under storage.root")
    seed: NonNegativeInt = Field(0, description="every random number of the run is derived from it")
    iterations: PositiveInt = Field(description="policy updates to make; can be raised later to continue")
    staleness: NonNegativeInt = Field(
        0, description="rollouts are sampled by a policy this many versions older, during updates; 0: in turn"
    )
    trackers: Annotated[tuple[str, ...], Uses.ADDRESS] = Field(
        (), description="where metrics and held-out images are logged: tensorboard, wandb, mlflow, trackio, swanlab"
    )
    project: Annotated[str, Uses.NOTHING] = Field(
        "grpo", min_length=1, description="project of the trackers; mlflow calls it an experiment"
    )
    continue_from: Annotated[str | None, Uses.PLACE] = Field(
        None,
        min_length=1,
        description="start from the weights of a policy of another run of storage.root, as RUN, RUN@N or RUN@best, "
        "with a new optimizer; null: from the model",
    )
    on_change: Literal["refuse", "restart"] = Field(
        "refuse",
        description="what a start does whose settings, code or prompts are not those of the stored policies; restart: "
        "begin at iteration 1, and the results become the run NAME~1",
    )
    keep_policies: KeepPoliciesSection | None = Field(None, description="null keeps every policy version")


class LoraSection(Section, LoraSettings):
    """Low-rank adapters over the frozen model; the names are peft's."""


class QuantizationSection(Section, QuantizationSettings):
    """The frozen weights in 4 bits, through bitsandbytes."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_8_bits(cls, values: Any) -> Any:
        """Say what replaces the settings of int8 that files and stored runs may still name."""
        if isinstance(values, dict) and ("int8_threshold" in values or values.get("kind") == "int8"):
            raise PydanticCustomError("int8", "Set kind to nf4 or fp4 (docs/models.md), and leave int8_threshold out")
        return values


Kind = PolicyKind


DEFAULT_KIND: Kind = "glm_image"
"""Of a model whose files are not on this machine, in sections that are built in Python."""


def kind_of(policy: Any) -> Kind:
    """Return the kind of a policy's plain values: the one that is given, or the one that the model's files tell."""
    given = policy if isinstance(policy, Mapping) else {}
    if (kind := given.get("kind")) in get_args(Kind):
        return cast(Kind, kind)
    model, revision = given.get("model"), given.get("revision")
    if kind is not None or not isinstance(model, str):
        return DEFAULT_KIND
    return read_kind(model, revision if isinstance(revision, str) else None) or DEFAULT_KIND


class PolicySection(Section):
    """The model that is trained."""

    keyless = frozenset({"gradient_checkpointing", "offload"})

    kind: Kind = Field(cast(Any, None), description="the policy family; null: read from the model's files")
    model: Annotated[str, Uses.PLACE] = Field(min_length=1, description="folder of a saved model, or a hub name")
    train: tuple[Stream, ...] = Field(
        ("tokens",),
        min_length=1,
        # The validators below hand on what was JSON as Python values, in which a tuple is a list.
        strict=False,
        description="of glm_image: tokens, denoising (its decoder), or both; of diffusers: denoising; of causal_lm "
        "and vision_lm: tokens",
    )
    revision: Annotated[str | None, Uses.NOTHING] = Field(
        None, min_length=1, description="branch, tag or commit of a hub name; null: main"
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = Field(
        None, description="of the trained model, as in transformers; null: transformers' default"
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="of the weights that are loaded")
    autocast: Literal["bfloat16"] | None = Field(
        None, description="compute in 16 bits over float32 weights, while sampling and while training"
    )
    lora: LoraSection | None = Field(
        LoraSection(), description="null trains every weight that is not frozen, or follows the adapter"
    )
    denoising_lora: LoraSection | None = Field(
        None, description="of the model that denoises, where tokens are trained too; null: as lora"
    )
    adapter: Annotated[str | None, Uses.PLACE] = Field(
        None, min_length=1, description="LoRA to start from: a folder, RUN@VERSION of the storage root, or a hub name"
    )
    quantization: QuantizationSection | None = Field(
        None, description="the frozen weights in 4 bits under adapters, while sampling and while training"
    )
    frozen: Annotated[str | None, Uses.NOTHING] = Field(
        None, description="regular expression: parameters frozen when lora is null"
    )
    freeze_vision: bool = Field(
        True, description="of vision_lm: train the language model alone, not what encodes its images"
    )
    gradient_checkpointing: bool = Field(False, description="less memory in the update, one more forward pass")
    offload: Literal["none", "components", "auto"] = Field(
        "none",
        description="components: what a stage does not need is not on the GPU, such as text encoders while the "
        "transformer is trained; auto: where the estimate says that all together do not fit",
    )

    @model_validator(mode="before")
    @classmethod
    def _follow_the_adapter(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("adapter") is not None and "lora" not in values:
            return {**values, "lora": None}
        return values

    @model_validator(mode="before")
    @classmethod
    def _train_what_the_kind_has(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kind = values["kind"] if values.get("kind") is not None else kind_of(values)
        if kind in get_args(Kind):
            return {"train": policy_family(kind).streams[:1], **values, "kind": kind}
        return values

    @field_validator("train")
    @classmethod
    def _in_one_order(cls, train: tuple[Stream, ...]) -> tuple[Stream, ...]:
        """Return the streams in the order of STREAMS: theirs means nothing, and would tell equal policies apart."""
        return tuple(sorted(train, key=STREAMS.index))

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams whose components are trained, in the order of STREAMS."""
        return tuple(stream for stream in STREAMS if stream in self.train)

    def lora_of(self, stream: Stream) -> LoraSection | None:
        """Return the configured adapters of a stream's component; None if every weight is trained, or by `adapter`."""
        own = self.denoising_lora if stream == "denoising" else None
        return own or self.lora

    @property
    def loras(self) -> Mapping[str, LoraSection]:
        """All configured adapters, by their place in the file."""
        given = {"policy.lora": self.lora, "policy.denoising_lora": self.denoising_lora}
        return {place: lora for place, lora in given.items() if lora is not None}

    @property
    def in_fp32(self) -> bool:
        """Whether log-probs are computed in fp32."""
        if self.quantization is not None and not self.quantization.computes_in_fp32(self.dtype):
            return False
        return self.dtype == "float32" and self.autocast is None

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained, and not the weights of the model."""
        return self.lora is not None or self.adapter is not None


_PROMPTS = (
    "a .txt, .jsonl, .json, .csv, .tsv or .parquet file, a folder of files with one of these endings, or a dataset of "
    "the Hugging Face Hub as hf://datasets/owner/name or owner/name"
)


class _OnePromptFile(Section):
    keyless = frozenset({"streaming"})

    prompts: Annotated[str | None, Uses.PLACE] = Field(None, min_length=1, description=_PROMPTS)
    split: Annotated[str | None, Uses.NOTHING] = Field(
        None, min_length=1, description="of a dataset, such as train[:1000]; null: train"
    )
    subset: Annotated[str | None, Uses.NOTHING] = Field(
        None, min_length=1, description="of a dataset with several; datasets calls it name"
    )
    revision: Annotated[str | None, Uses.NOTHING] = Field(
        None, min_length=1, description="branch, tag or commit of the Hub; null: main"
    )
    streaming: bool = Field(False, description="read a dataset's first rows, as many as limit, without downloading all")
    prompt_column: Annotated[str | dict[str, str] | None, Uses.NOTHING] = Field(
        None, description="null: found by its usual names; a column per role, {system: a, user: b}: messages"
    )
    columns: Annotated[tuple[str, ...] | None, Uses.NOTHING] = Field(
        None, description="the other columns that go along to the rewards; null: all but binary ones"
    )
    limit: PositiveInt | None = Field(None, description="use only the first prompts, this many")
    targets: Annotated[str | None, Uses.FOLDER] = Field(
        None, description="folder of target images, paired by index or by target_column"
    )
    target_column: Annotated[str | None, Uses.NOTHING] = Field(
        None, description="file name of each prompt's target image, relative to targets"
    )
    image_column: Annotated[str | None, Uses.NOTHING] = Field(
        None,
        min_length=1,
        description="images in the prompts, to edit or to look at; null: none, or of a vision model image and images",
    )
    max_image_pixels: int | None = Field(
        None, gt=0, le=MAX_PIXELS, description="largest width times height of an image in a prompt; null: 8192 x 8192"
    )
    height: PositiveInt | None = Field(None, description="of images whose row gives no size; null: the rollout's")
    width: PositiveInt | None = Field(None, description="of images whose row gives no size; null: the rollout's")


class DatasetSection(_OnePromptFile):
    """One prompt file among several."""

    name: Name = Field(description="stored with every rollout; rewards can be limited to datasets by name")
    prompts: Annotated[str, Uses.PLACE] = Field(min_length=1, description=_PROMPTS)
    weight: PositiveFloat = Field(1.0, description="share of the prompts on average, relative to the other datasets")

    @property
    def target_folder(self) -> str:
        """The folder of target images: that of the prompt file where none is named; empty is the working directory."""
        return self.prompts.rpartition("/")[0] if self.targets is None else self.targets


class PromptsSection(_OnePromptFile):
    """One prompt file, or several with names and weights."""

    datasets: tuple[DatasetSection, ...] = Field((), description="instead of the fields above")

    @property
    def sets(self) -> tuple[DatasetSection, ...]:
        """The prompt files; a single file has the name `default`."""
        if self.datasets or self.prompts is None:
            return self.datasets
        return (DatasetSection(name="default", **{name: getattr(self, name) for name in _OnePromptFile.model_fields}),)

    def placed(self, place: str) -> Iterator[tuple[str, DatasetSection]]:
        """Yield each prompt file with its place in the configuration, given that of this section."""
        for index, dataset in enumerate(self.sets):
            yield f"{place}.datasets.{index}" if self.datasets else place, dataset


class CurriculumSection(Section):
    """How the prompts of an iteration are sampled."""

    kind: Literal["uniform", "difficulty"] = Field("uniform", description="every prompt equally often, or by reward")
    target: float = Field(0.5, description="mean group reward that teaches most; prompts near it are preferred")
    width: PositiveFloat = Field(0.25, description="how far from the target a prompt's mean still counts")
    floor: float = Field(0.1, gt=0, le=1, description="lowest weight of a prompt, relative to the highest")
    window: PositiveInt = Field(20, description="number of past iterations that count")


class DataSection(PromptsSection):
    """Training prompts, and their target images."""

    curriculum: CurriculumSection = CurriculumSection()


class EvaluateSection(PromptsSection):
    """Held-out prompts, sampled with fixed seeds before, during and after training."""

    every: NonNegativeInt = Field(0, description="iterations between evaluations; 0: before and after only")
    samples_per_prompt: PositiveInt = Field(
        4, description="samples of each held-out prompt, always with the same seeds"
    )
    seed: NonNegativeInt = Field(0, description="of the held-out samples; the same for every training seed")
    num_inference_steps: PositiveInt | None = Field(
        None, description="denoising steps of held-out images, all without noise; null: the rollout's"
    )
    guidance_scale: NonNegativeFloat | None = Field(None, description="of held-out images; null: the rollout's")


class _GroupsSection(Section):
    keyless = frozenset({"prompts_per_batch"})

    training_settings: ClassVar[frozenset[str]] = frozenset({"prompts_per_iteration", "group_size"})
    """Fields without effect on held-out samples."""

    prompts_per_iteration: PositiveInt = Field(8, description="groups of an iteration")
    group_size: int = Field(
        8, ge=2, le=100_000, description="samples per prompt; advantages compare siblings, so at least 2"
    )
    prompts_per_batch: PositiveInt = Field(4, description="prompts sampled at once")

    def images_of_samples(self, streams: tuple[Stream, ...]) -> tuple[int, ...]:
        """Return how many images each token sample of a prompt gets; one sample has all if no tokens are trained."""
        return (1,) * self.group_size if "tokens" in streams else (self.group_size,)

    def for_evaluation(self, evaluate: EvaluateSection) -> Self:
        """Return the settings of held-out samples."""
        return self


class ImageRolloutSection(_GroupsSection, ImageSettings):
    """How groups of images are sampled, whatever makes them."""

    keyless = frozenset({"prompts_per_batch", "decode_batch_size"})
    noise_settings: ClassVar[frozenset[str]] = frozenset(field.name for field in fields(DenoisingSettings)) - {
        "num_inference_steps",
        "guidance_scale",
    }
    """Fields about noisy denoising steps."""

    training_settings = _GroupsSection.training_settings | noise_settings

    shared_noise: bool = Field(description="siblings start from the same noise")

    def for_evaluation(self, evaluate: EvaluateSection) -> Self:
        """Return the settings of held-out images, with the steps, guidance and size that the evaluation sets."""
        own: dict[str, Any] = {name: getattr(evaluate, name) for name in ("num_inference_steps", "guidance_scale")}
        # Prompt files of several sizes say nothing of an image outside of them.
        sizes = {(each.height, each.width) for each in evaluate.sets}
        if len(sizes) == 1:
            own["height"], own["width"] = sizes.pop()
        return self.model_copy(update={name: value for name, value in own.items() if value is not None})


class GlmImageRolloutSection(ImageRolloutSection, GlmImageSettings):
    """How groups of GLM-Image's images are sampled."""

    training_settings = ImageRolloutSection.training_settings | {"images_per_sample", "samples_with_images"}

    shared_noise: bool = Field(True, description="siblings share the decoder's first noise")
    samples_with_images: PositiveInt = Field(
        1, description="with tokens and denoising trained: token samples of a prompt that get several images"
    )
    images_per_sample: PositiveInt = Field(
        1, description="with tokens and denoising trained: images of each of these, at least 2; the others get 1"
    )

    def images_of_samples(self, streams: tuple[Stream, ...]) -> tuple[int, ...]:
        """Return how many images each token sample of a prompt gets; uneven where both streams are trained."""
        if len(streams) == 1:
            return super().images_of_samples(streams)
        several = min(self.samples_with_images, self.group_size)
        return (self.images_per_sample,) * several + (1,) * (self.group_size - several)


class DiffusersRolloutSection(ImageRolloutSection, DiffusersSettings):
    """How groups of a pipeline's images are sampled."""

    shared_noise: bool = Field(False, description="siblings start from the same noise and differ by their noisy steps")

    def for_evaluation(self, evaluate: EvaluateSection) -> Self:
        """Return the settings of held-out images; without noisy steps siblings differ by their first noise alone."""
        return super().for_evaluation(evaluate).model_copy(update={"shared_noise": False})


class VllmSection(Section, VllmSettings):
    """The vLLM servers that answer for the policy."""

    keyless = frozenset({"url", "command", "token_env", "timeout_s", "concurrency", "adapter_folder"})


def _engine_of_a_run(engine: object) -> object:
    """Say what replaces an engine that files and stored runs may still name."""
    if engine == "continuous_batching":
        hint = "Write policy, the model itself, or vllm with its servers in rollout.vllm (docs/operations.md)"
        raise PydanticCustomError("engine", hint)
    return engine


class TextRolloutSection(_GroupsSection, CausalLMSettings):
    """How groups of texts are sampled."""

    engine: Annotated[EngineName, BeforeValidator(_engine_of_a_run)] = Field(
        "policy", description="who samples: policy, the model itself; vllm, servers over HTTP"
    )
    vllm: VllmSection | None = Field(None, description="the servers of engine vllm")

    def check(self) -> None:
        """Refuse settings of an engine that is not used, and what the engine cannot sample."""
        super().check()
        refuse_truncation(self.engine, self)
        if (self.engine == "vllm") != (self.vllm is not None):
            hint = "Engine vllm needs its servers here, and engine policy has none; give both or neither."
            raise InputError("rollout.vllm", None if self.vllm is None else "a section", hint)


class VisionRolloutSection(TextRolloutSection, VisionLMSettings):
    """How groups of texts about images are sampled."""


RolloutSection = GlmImageRolloutSection | DiffusersRolloutSection | TextRolloutSection | VisionRolloutSection


Device = Literal["auto", "cpu", "cuda"] | NonNegativeInt
"""A device of this machine; a number is the index of a GPU, as PyTorch counts them."""


class StagePlacement(Section):
    """Where one stage runs."""

    pool: Name | None = Field(None, description="a work pool of the Prefect server; null: in this process")
    timeout: PositiveFloat | None = Field(
        None, description="seconds after which the stage is stopped; runs it in a separate process"
    )


class ShardedStagePlacement(StagePlacement):
    """Where a stage runs that can be split into shards of complete groups."""

    shards: PositiveInt | None = Field(
        None, description="shards that run in parallel, joined in order; null: one per device, on a pool 1"
    )


_COUNTED_ALONE = frozenset({"storage", "service", "lost", "timeout", "max_delay"})


class RetrySection(Section):
    """How often a stage is tried that meets temporary errors; each shard of a stage is counted alone."""

    tries: PositiveInt = Field(
        5, description="of a stage whose storage, service, process or worker fails for a while, or that is timed out"
    )
    delay: PositiveFloat = Field(
        2.0, description="seconds before the second try; doubled each time up to a minute, with jitter"
    )

    @model_validator(mode="before")
    @classmethod
    def _counted_together(cls, values: Any) -> Any:
        """Say what replaces the keys that files may still have."""
        if isinstance(values, Mapping) and not _COUNTED_ALONE.isdisjoint(values):
            raise PydanticCustomError("retries", "All temporary errors count together: write {tries: 5, delay: 2}")
        return values


class PlacementSection(Section):
    """Where the stages run; it changes results by rounding at most."""

    devices: tuple[Device, ...] = Field(
        ("auto",),
        min_length=1,
        description="where models run. auto, cpu or cuda: in the run's process, auto on a GPU if there is one. "
        "[0, 1] or [cpu, cpu]: a process per device, for rollouts, rewards and the update",
    )
    torch_threads: PositiveInt = Field(
        1, description="of each process; measure before raising: on a small shared machine 1 is fastest"
    )
    sharding: Literal["ddp", "fsdp2"] = Field("ddp", description="ddp: each process has all weights; fsdp2: a share")
    rollouts: ShardedStagePlacement = ShardedStagePlacement()
    rewards: ShardedStagePlacement = ShardedStagePlacement()
    advantages: StagePlacement = StagePlacement()
    update: StagePlacement = StagePlacement()
    retries: RetrySection = RetrySection()

    @field_validator("devices", mode="before")
    @classmethod
    def _accept_one(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    @property
    def in_processes(self) -> bool:
        """Whether each device has a process; a GPU named by its index is seen by no other process of the run."""
        return len(self.devices) > 1 or isinstance(self.devices[0], int)

    @property
    def names_devices_here(self) -> bool:
        """Whether these processes are the run's; with rollouts and updates on pools they are the workers'."""
        return self.in_processes and not (self.rollouts.pool and self.update.pool)

    def shards_of(self, where: ShardedStagePlacement) -> int:
        """Return the number of parts into which the stage of this section is cut."""
        if where.pool is None and not self.names_devices_here:
            return 1
        return where.shards or (len(self.devices) if where.pool is None else 1)

    def uncut(self) -> Self:
        """Return the placement of a part of a stage."""
        kinds = ("rollouts", "rewards")
        return self.model_copy(update={kind: getattr(self, kind).model_copy(update={"shards": 1}) for kind in kinds})

    def on(self, device: Device) -> Self:
        """Return the placement for the process of one device, which sees no other GPU."""
        return self.model_copy(update={"devices": ("cuda" if isinstance(device, int) else device,)})


class StorageSection(Section):
    """Where runs are kept."""

    root: Annotated[str, Uses.ROOT] = Field(
        "runs",
        min_length=1,
        description="a folder, or an fsspec URL that refuses to create a file twice, such as s3://",
    )
    cache_dir: Annotated[str | None, Uses.WRITTEN] = Field(
        None,
        min_length=1,
        description="local copies of files read from a bucket, on every machine of the run; null, or not writable: the "
        "user's cache folder",
    )
    cache_gib: PositiveFloat = Field(20.0, description="maximum size of these copies; the oldest are deleted first")
