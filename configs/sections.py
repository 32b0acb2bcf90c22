"""The sections of a configuration about the run and the policy.

A section that the core uses inherits the core's settings: fields, ranges and defaults are declared there, and the
section adds the fields that only a configuration has.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from configs.validation import OptionalText, RunName, Section
from grpo_core.errors import InputError
from grpo_core.pipeline_files import PolicyKind, read_kind
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.quantization import QuantizationSettings
from grpo_core.policies.trained.settings import LoraSettings
from grpo_core.rollouts.streams import STREAMS, Stream
from grpo_core.uses import Uses


class KeepPoliciesSection(Section):
    """The policy versions that stay stored, each with its optimizer state; a training deletes the others."""

    above_gb: NonNegativeFloat = Field(0, description="versions of at most so many GB all stay")
    last: PositiveInt = Field(2, description="this many at the end; more if run.staleness samples with more")
    every: PositiveInt | None = Field(None, description="versions N, 2N, ...; null: none of them")
    best: bool = Field(True, description="the version with the highest held-out reward so far")

    def deletes(self, size: int) -> bool:
        """Whether versions of so many bytes are deleted."""
        return size > self.above_gb * 1e9

    def count(self, iterations: int, staleness: int, size: int) -> int:
        """Return the maximum number of versions of so many bytes stored at once, with the one that is being written."""
        if not self.deletes(size):
            return iterations
        on_the_way = iterations // self.every if self.every else 0
        return min(iterations, max(self.last, staleness + 1) + 1 + on_the_way + self.best)


class RunSection(Section):
    """Name, seed and length of the run."""

    name: RunName = Field(description="folder of the run under storage.root")
    seed: NonNegativeInt = Field(0, description="every random number of the run is derived from it")
    iterations: PositiveInt = Field(description="policy updates to make; can be raised later to continue")
    staleness: NonNegativeInt = Field(
        0, description="sample with a policy this many versions older, during updates; 0: in turn"
    )
    trackers: Annotated[tuple[str, ...], Uses.ADDRESS] = Field(
        (), description="tensorboard, wandb, mlflow, trackio, swanlab and others of accelerate"
    )
    project: Annotated[str, Uses.NOTHING] = Field(
        "grpo", min_length=1, description="project of the trackers; mlflow calls it an experiment"
    )
    continue_from: Annotated[str | None, Uses.PLACE] = Field(
        None,
        min_length=1,
        description="start from the weights of another run, RUN[@N|@best], with a new optimizer; null: from the model",
    )
    on_change: Literal["refuse", "restart"] = Field(
        "refuse",
        description="what to do when settings, code or prompts differ from those of the stored policies; restart: "
        "begin at iteration 1, and the results become the run NAME~1",
    )
    keep_policies: KeepPoliciesSection | None = Field(
        KeepPoliciesSection(above_gb=1, last=3),
        description="without it, of versions over 1 GB the last 3 and the best stay; null keeps every policy version",
    )


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
        description="of glm_image: tokens, denoising (its decoder), or both; of any other kind the only stream it has",
    )
    revision: OptionalText = Field(None, description="branch, tag or commit of a hub name; null: main")
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flex_attention"] | None = Field(
        None, description="of the trained model, as in transformers; null: transformers' default"
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="of the weights that are loaded")
    autocast: Literal["bfloat16"] | None = Field(None, description="compute in 16 bits over float32 weights")
    lora: LoraSection | None = Field(
        LoraSection(), description="null trains every weight that is not frozen, or follows the adapter"
    )
    denoising_lora: LoraSection | None = Field(
        None, description="of the model that denoises, where tokens are trained too; null: as lora"
    )
    adapter: Annotated[str | None, Uses.PLACE] = Field(
        None, min_length=1, description="LoRA to start from: a folder, RUN@VERSION of the storage root, or a hub name"
    )
    quantization: QuantizationSection | None = Field(None, description="the frozen weights in 4 bits, under adapters")
    frozen: Annotated[str | None, Uses.NOTHING] = Field(
        None, description="regular expression: parameters frozen when lora is null"
    )
    freeze_vision: bool = Field(
        True, description="of vision_lm: train the language model alone, not what encodes its images"
    )
    gradient_checkpointing: bool = Field(False, description="less memory in the update, one more forward pass")
    offload: Literal["none", "components", "auto"] = Field(
        "none",
        description="components: what a stage does not need is not on the GPU; auto: only if the model would not fit "
        "otherwise",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Fill in the kind, what it trains, and that an adapter brings its own settings."""
        if not isinstance(values, dict):
            return values
        filled = {**values, "lora": None} if values.get("adapter") is not None and "lora" not in values else values
        kind = values["kind"] if values.get("kind") is not None else kind_of(values)
        return {"train": policy_family(kind).streams[:1], **filled, "kind": kind} if kind in get_args(Kind) else filled

    @field_validator("train")
    @classmethod
    def _in_one_order(cls, train: tuple[Stream, ...]) -> tuple[Stream, ...]:
        """Return the streams in the order of STREAMS: theirs means nothing, and would tell equal policies apart."""
        return tuple(sorted(train, key=STREAMS.index))

    def contradictions(self) -> Iterator[InputError]:
        """Yield what of the model cannot be trained as configured."""
        if not self.trains_adapters and self.dtype != "float32":
            hint = "Small steps round away in 16 bits when every weight is trained; use float32, or set policy.lora."
            yield InputError("dtype", self.dtype, hint)
        if self.trains_adapters and self.frozen is not None:
            hint = "Adapters already freeze every weight of the model; set policy.lora to null, or leave this out."
            yield InputError("frozen", self.frozen, hint)
        for place, lora in self.loras.items():
            if lora.modules_to_save and self.dtype != "float32":
                hint = "Small steps round away in 16 bits when a module is trained whole; set policy.dtype to float32."
                yield InputError(f"{place}.modules_to_save", list(lora.modules_to_save), hint)
        if self.denoising_lora is not None and (len(self.streams) == 1 or self.lora is None):
            hint = "It replaces policy.lora for denoising, where tokens are trained by adapters too; set policy.lora."
            yield InputError("denoising_lora", self.denoising_lora.model_dump(exclude_defaults=True), hint)
        if self.revision is not None and Path(self.model).expanduser().is_dir():
            yield InputError("revision", self.revision, "policy.model is a folder, not a hub name; leave it out.")
        if self.attn_implementation == "flash_attention_2" and self.in_fp32:
            hint = "It computes in 16 bits only; set policy.dtype or policy.autocast to bfloat16, or use sdpa."
            yield InputError("attn_implementation", self.attn_implementation, hint)
        if self.autocast is not None and self.dtype != "float32":
            hint = "It computes in 16 bits over float32 weights; set policy.dtype to float32, or leave this out."
            yield InputError("autocast", self.autocast, hint)
        text = policy_family(self.kind).modality == "text"
        if self.offload == "components" and text:
            hint = "A language model is one network, which every stage needs; use none, or policy.quantization."
            yield InputError("offload", self.offload, hint)
        if self.quantization is None:
            return
        if self.autocast is not None:
            hint = "Quantized layers compute in policy.quantization.compute_dtype; set that, and leave this out."
            yield InputError("autocast", self.autocast, hint)
        if self.quantization.components is not None and text:
            hint = "A language model is no pipeline of several; leave it out, or use skip_modules."
            yield InputError("quantization.components", list(self.quantization.components), hint)

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
        """All configured adapters, by their place in the section."""
        given = {"lora": self.lora, "denoising_lora": self.denoising_lora}
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
