"""GLM-Image behind the Policy protocol. Nothing outside this package knows of grids, latents or denoising."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import GlmImagePipeline
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_core.errors import InputError
from grpo_core.policies.adapters import FullModel, LoraModel, LoraSettings, TrainedModel
from grpo_core.policies.glm_image.decoding import decode_group, large_grid_ids
from grpo_core.policies.glm_image.geometry import TokenGrids, token_grids
from grpo_core.policies.glm_image.loading import load_pipeline, pixel_unit, read_initial_state
from grpo_core.policies.glm_image.prompts import EncodedPrompts, encode_prompts
from grpo_core.policies.glm_image.sampling import sample_tokens
from grpo_core.policies.glm_image.scoring import score_tokens
from grpo_core.records import SampledTokens, TokenBatch, TokenLogprobs

# Short names such as "q_proj" would also match the vision tower, which sampling from text never runs.
LANGUAGE_MODEL_LINEARS = (
    r".*language_model\.layers\.\d+\.(self_attn\.(q_proj|k_proj|v_proj|o_proj)|mlp\.(gate_up_proj|down_proj))"
)
FROZEN_PARTS = ("model.visual.", "model.vqmodel.")


@dataclass(frozen=True)
class GlmImageSettings:
    """How pictures are drawn.

    Attributes:
        height: pixels, a multiple of the model's unit.
        width: pixels, likewise.
        temperature: of the token distribution.
        num_inference_steps: denoising steps of the decoder.
        guidance_scale: of the decoder; the token model has none.
        decode_batch_size: pictures decoded at once, at most; siblings only.
    """

    height: int
    width: int
    temperature: float = 1.0
    num_inference_steps: int = 50
    guidance_scale: float = 1.5
    decode_batch_size: int = 16


@dataclass(frozen=True)
class TrainingChoice:
    """What of the token model is trained.

    Attributes:
        lora: adapters over the frozen model; None trains every weight of the language model.
        keep_reference: keep a frozen copy for the KL when every weight is trained.
        gradient_checkpointing: recompute activations in the backward pass.
        seed: of the adapters' random half.
    """

    lora: LoraSettings | None
    keep_reference: bool = False
    gradient_checkpointing: bool = False
    seed: int = 0


class GlmImagePolicy:
    """The autoregressive half is the policy; the diffusion decoder is frozen and part of the environment."""

    def __init__(self, pipeline: GlmImagePipeline, settings: GlmImageSettings, trained: TrainedModel) -> None:
        """Put the parts together; `load` is the usual way."""
        self.pipeline = pipeline
        self.trained = trained
        self.gradient_checkpointing = False
        self.draw_with(settings)

    def draw_with(self, settings: GlmImageSettings) -> None:
        """Draw with these settings from now on.

        Raises:
            InputError: a size that the model cannot draw.
        """
        self.grids: TokenGrids = token_grids(settings.height, settings.width, pixel_unit(self.pipeline))
        self.settings = settings

    @classmethod
    def load(
        cls, model: str, settings: GlmImageSettings, choice: TrainingChoice, *, dtype: torch.dtype, device: torch.device
    ) -> "GlmImagePolicy":
        """Load by folder or hub name.

        Raises:
            InputError: no such model, a size the model cannot draw, or adapter targets that match nothing.
        """
        pipeline = load_pipeline(model, dtype=dtype, device=device)
        base = pipeline.vision_language_encoder
        trained: TrainedModel
        if choice.lora is not None:
            trained = LoraModel(base, choice.lora, base_name=model, seed=choice.seed)
        else:
            trained = FullModel(
                base,
                frozen=lambda name: name.startswith(FROZEN_PARTS),
                initial_state=lambda: read_initial_state(model, dtype),
                keep_reference=choice.keep_reference,
            )
        policy = cls(pipeline, settings, trained)
        if choice.gradient_checkpointing:
            base.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
            policy.gradient_checkpointing = True
        return policy

    @property
    def support(self) -> int:
        """Ids [0, support) are picture codes: all that is sampled and scored."""
        return int(self._base.config.vq_config.num_embeddings)

    @property
    def _base(self) -> Any:
        return self.pipeline.vision_language_encoder

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._base.device
        return device

    def _encode(self, prompts: Sequence[str]) -> EncodedPrompts:
        return encode_prompts(
            self._base.model, self.pipeline.processor, prompts, self.settings.height, self.settings.width
        )

    def _encode_rows(self, prompts: Sequence[str]) -> EncodedPrompts:
        """One row a prompt, each distinct prompt encoded once."""
        distinct = list(dict.fromkeys(prompts))
        place = {prompt: index for index, prompt in enumerate(distinct)}
        rows = torch.tensor([place[prompt] for prompt in prompts], device=self._device)
        return self._encode(distinct).select(rows)

    def sample(self, prompts: Sequence[str], *, group_size: int, seeds: Sequence[int]) -> SampledTokens:
        """See Policy.sample."""
        # A layer that is being checkpointed drops its cache.
        self.prepare_for_sampling()
        encoded = self._encode(list(prompts))
        ids, logprobs = sample_tokens(
            self.trained.model,
            encoded,
            group_size=group_size,
            tokens=self.grids.tokens,
            seeds=seeds,
            support=self.support,
            temperature=self.settings.temperature,
        )
        rows = tuple(prompt for prompt in prompts for _ in range(group_size))
        mask = torch.ones_like(ids, dtype=torch.bool)
        return SampledTokens(TokenBatch(rows, ids.cpu(), mask.cpu(), self.settings.temperature), logprobs.cpu())

    def render(self, tokens: TokenBatch, *, noise_seeds: Sequence[int]) -> list[Image.Image]:
        """See Policy.render."""
        token_ids, loss_mask = self._padded(tokens.token_ids), self._padded(tokens.loss_mask)
        prior = large_grid_ids(token_ids, loss_mask, self.grids).to(self._device)
        images: list[Image.Image | None] = [None] * len(tokens)
        for prompt in dict.fromkeys(tokens.prompts):
            siblings = [row for row, text in enumerate(tokens.prompts) if text == prompt]
            for start in range(0, len(siblings), self.settings.decode_batch_size):
                chunk = siblings[start : start + self.settings.decode_batch_size]
                decoded = decode_group(
                    self.pipeline,
                    prompt,
                    prior[chunk],
                    height=self.settings.height,
                    width=self.settings.width,
                    noise_seeds=[noise_seeds[row] for row in chunk],
                    num_inference_steps=self.settings.num_inference_steps,
                    guidance_scale=self.settings.guidance_scale,
                )
                for row, image in zip(chunk, decoded, strict=True):
                    images[row] = image
        return [image for image in images if image is not None]

    def _padded(self, values: Int[Tensor, "batch time"]) -> Int[Tensor, "batch full"]:
        """Short grids are filled on the right with zeros (False)."""
        missing = self.grids.tokens - values.shape[1]
        if missing < 0:
            mend = f"A {self.settings.height}x{self.settings.width} picture has {self.grids.tokens} tokens."
            raise InputError("token_ids", values.shape[1], mend)
        return nn.functional.pad(values, (0, missing))

    def _score(self, model: nn.Module, tokens: TokenBatch) -> TokenLogprobs:
        self._padded(tokens.loss_mask)
        device = self._device
        return score_tokens(
            model,
            self._encode_rows(tokens.prompts),
            tokens.token_ids.to(device),
            tokens.loss_mask.to(device),
            support=self.support,
            temperature=tokens.temperature,
        )

    def logprobs(self, tokens: TokenBatch) -> TokenLogprobs:
        """See Policy.logprobs."""
        return self._score(self.trained.model, tokens)

    def reference_logprobs(self, tokens: TokenBatch) -> Float[Tensor, "batch time"]:
        """See Policy.reference_logprobs."""
        with torch.no_grad(), self.trained.reference() as reference:
            return self._score(reference, tokens).logprobs

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """See Policy.trainable_parameters."""
        return self.trained.trainable_parameters()

    def prepare_for_update(self) -> None:
        """Dropout would make the ratio differ from one on unchanged weights, so it stays off.

        Layers are checkpointed in training mode only, while their attention has a dropout of its own: the layer alone
        is told that it trains, not the modules inside.
        """
        self.trained.model.eval()
        for module in self.trained.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = self.gradient_checkpointing

    def prepare_for_sampling(self) -> None:
        """See Policy.prepare_for_sampling."""
        self.trained.model.eval()

    def save_weights(self, folder: Path) -> None:
        """See Policy.save_weights."""
        self.trained.save(folder)

    def load_weights(self, folder: Path | None) -> None:
        """See Policy.load_weights."""
        self.trained.load(folder)
