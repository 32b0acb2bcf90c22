"""The sections `rollout`: how groups are sampled, by policy.kind."""

import operator
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, PositiveInt
from pydantic_core import PydanticCustomError

from configs.prompts import EvaluateSection
from configs.validation import Section
from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.denoising.settings import DenoisingSettings, Solver
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from grpo_core.policies.engines.settings import EngineName, VllmSettings, refuse_truncation
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.rollouts.streams import Stream
from grpo_core.settings import ImageSettings


class _GroupsSection(Section):
    keyless = frozenset({"prompts_per_batch"})

    training_settings: ClassVar[frozenset[str]] = frozenset({"prompts_per_iteration", "group_size"})
    """Fields without effect on held-out samples."""

    prompts_per_iteration: PositiveInt = Field(8, description="groups of an iteration")
    group_size: int = Field(8, ge=2, le=100_000, description="samples per prompt")
    prompts_per_batch: PositiveInt = Field(4, description="prompts sampled at once")

    def images_of_samples(self, streams: tuple[Stream, ...]) -> tuple[int, ...]:
        """Return how many images each token sample of a prompt gets; one sample has all if no tokens are trained."""
        return (1,) * self.group_size if "tokens" in streams else (self.group_size,)

    def for_evaluation(self, evaluate: EvaluateSection) -> Self:
        """Return the settings of held-out samples."""
        return self


class KeepSection(Section):
    """The previews of a prompt whose seeds are trained."""

    best: PositiveInt = Field(description="those with the highest advantages")
    worst: PositiveInt = Field(description="those with the lowest")


class PreviewsSection(Section):
    """Cheap images of many seeds; some are made again with all steps and trained (Sol-RL, arXiv:2604.06916)."""

    per_prompt: int = Field(ge=1, le=100_000, description="previews of a prompt, each with a seed of its own")
    steps: PositiveInt = Field(description="denoising steps of a preview, fewer than num_inference_steps")
    keep: KeepSection | None = Field(
        None, description="the previews whose seeds are trained, group_size together; null: a half each"
    )
    solver: Solver | None = Field(
        None,
        exclude_if=operator.not_,
        description="of their steps; null: rollout.solver",
    )


class ImageRolloutSection(_GroupsSection, ImageSettings):
    """How groups of images are sampled, whatever makes them."""

    keyless = frozenset({"prompts_per_batch", "decode_batch_size", "branch"})
    noise_settings: ClassVar[frozenset[str]] = frozenset(field.name for field in fields(DenoisingSettings)) - {
        "num_inference_steps",
        "guidance_scale",
        "solver",
    }
    """Fields about noisy denoising steps."""

    training_settings = _GroupsSection.training_settings | noise_settings | {"previews"}

    shared_noise: bool = Field(description="siblings start from the same noise")
    previews: PreviewsSection | None = Field(
        None,
        exclude_if=operator.not_,  # runs without previews keep their keys
        description="cheap images that choose the seeds that are trained; null: none",
    )

    @property
    def keep(self) -> KeepSection:
        """How many of the best and of the worst previews are trained."""
        assert self.previews is not None
        return self.previews.keep or KeepSection(best=(self.group_size + 1) // 2, worst=self.group_size // 2)

    def for_previews(self) -> Self:
        """Return the settings of previews."""
        previews = self.previews
        assert previews is not None
        own = {} if previews.solver is None else {"solver": previews.solver}
        return self.model_copy(update={"num_inference_steps": previews.steps, "previews": None, **own})

    def for_evaluation(self, evaluate: EvaluateSection) -> Self:
        """Return the settings of held-out images, with the steps, guidance and size that the evaluation sets."""
        own: dict[str, Any] = {name: getattr(evaluate, name) for name in ("num_inference_steps", "guidance_scale")}
        # Prompt files of several sizes say nothing of an image outside of them.
        sizes = {(each.height, each.width) for each in evaluate.sets}
        if len(sizes) == 1:
            own["height"], own["width"] = sizes.pop()
        given = {name: value for name, value in own.items() if value is not None}
        return self.model_copy(update={**given, "previews": None})


class GlmImageRolloutSection(ImageRolloutSection, GlmImageSettings):
    """How groups of GLM-Image's images are sampled."""

    training_settings = ImageRolloutSection.training_settings | {"images_per_sample", "samples_with_images"}

    shared_noise: bool = Field(True, description="siblings start from the same noise")
    samples_with_images: PositiveInt = Field(
        1, description="where tokens and denoising are trained: token samples of a prompt that get several images"
    )
    images_per_sample: PositiveInt = Field(1, description="images of each of these, at least 2; the others get 1")

    def images_of_samples(self, streams: tuple[Stream, ...]) -> tuple[int, ...]:
        """Return how many images each token sample of a prompt gets; uneven where both streams are trained."""
        if len(streams) == 1:
            return super().images_of_samples(streams)
        several = min(self.samples_with_images, self.group_size)
        return (self.images_per_sample,) * several + (1,) * (self.group_size - several)


class DiffusersRolloutSection(ImageRolloutSection, DiffusersSettings):
    """How groups of a pipeline's images are sampled."""

    shared_noise: bool = Field(False, description="siblings start from the same noise")

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
        if self.engine == "vllm" and self.cache_implementation == "static":
            hint = "The servers of vLLM have a cache of their own; leave it out, or set rollout.engine to policy."
            raise InputError("rollout.cache_implementation", self.cache_implementation, hint)
        if (self.engine == "vllm") != (self.vllm is not None):
            hint = "Engine vllm needs its servers here, and engine policy has none; give both or neither."
            raise InputError("rollout.vllm", None if self.vllm is None else "a section", hint)


class VisionRolloutSection(TextRolloutSection, VisionLMSettings):
    """How groups of texts about images are sampled."""


RolloutSection = GlmImageRolloutSection | DiffusersRolloutSection | TextRolloutSection | VisionRolloutSection
