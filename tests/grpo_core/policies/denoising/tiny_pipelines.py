"""Random pipelines of the real classes, small enough to run in milliseconds, and components over them."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from grpo_core.policies.denoising.component import DenoisingComponent
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.policies.glm_image.decoding import GlmImageDecoder
from grpo_core.policies.glm_image.loading import load_pipeline
from grpo_core.policies.glm_image.settings import GlmImageSettings, read_pixel_unit, token_grids
from grpo_core.policies.trained.lora_and_full import LoraModel, train_model
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rollouts.actions import DenoisingBatch, TokenBatch
from grpo_core.rollouts.records import GroupRequest
from grpo_core.rollouts.streams import ImageSize

PIPELINES = ("sd3", "flux", "qwen_image", "z_image", "glm_image")
SIZE = ImageSize(32, 32)
DECODER_LINEARS = r".*(to_q|to_k|to_v|to_out\.0)"
GLM_IMAGE = Path(__file__).parents[4] / "data" / "models" / "tiny-glm-image"
Arguments = Callable[..., Mapping[str, Any]]
DUAL_STREAM: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
AUTOENCODER: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (4, 4),
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "scaling_factor": 1.5,
    "shift_factor": 0.05,
    "latent_channels": 4,
}
VIDEO_AUTOENCODER: dict[str, Any] = {
    "z_dim": 4,
    "num_res_blocks": 1,
    "latents_mean": [0.1] * 4,
    "latents_std": [0.9] * 4,
}


def flow_scheduler() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


def embedded(text: str, *shape: int) -> Tensor:
    """Return numbers that depend on the text alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(text.encode())))


def texts(prompts: Sequence[str], *shape: int) -> Tensor:
    """Embeddings of each prompt."""
    return torch.stack([embedded(each, *shape) for each in prompts])


class RandomComponent(DenoisingComponent):
    """A pipeline without text encoders; a prompt's embeddings are random numbers."""

    def __init__(self, pipeline: Any, *args: Any, arguments: Arguments, **options: Any) -> None:
        super().__init__(pipeline, *args, **options)
        self.arguments = arguments

    def call_arguments(
        self, prompts: Sequence[str], drafts: TokenBatch | None, size: ImageSize, sources: tuple[Any, ...] = ()
    ) -> Mapping[str, Any]:
        dtype = next(self.trained.model.parameters()).dtype
        found = self.arguments(prompts, self.settings.guidance_scale)
        given = {name: tree_map_only(Tensor, lambda each: _as(each, dtype), value) for name, value in found.items()}
        return {"height": size.height, "width": size.width, **given}


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def seeded(build: Callable[..., Any], seed: int = 0, /, **config: Any) -> Any:
    """A part with random weights of this seed."""
    torch.manual_seed(seed)
    return build(**config)


def autoencoder(**changes: Any) -> Any:
    return seeded(diffusers.AutoencoderKL, 1, **{**AUTOENCODER, **changes})


def sd3() -> tuple[Any, Arguments]:
    transformer = seeded(
        diffusers.SD3Transformer2DModel,
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    vae = autoencoder(use_quant_conv=False, use_post_quant_conv=False)

    def arguments(prompts: Sequence[str], guidance_scale: float) -> Mapping[str, Any]:
        none = [""] * len(prompts)
        return {
            "prompt_embeds": texts(prompts, 6, 32),
            "pooled_prompt_embeds": texts(prompts, 64),
            "negative_prompt_embeds": texts(none, 6, 32),
            "negative_pooled_prompt_embeds": texts(none, 64),
            "guidance_scale": guidance_scale,
        }

    return diffusers.StableDiffusion3Pipeline(transformer, scheduler, vae, *(None,) * 6), arguments


def flux() -> tuple[Any, Arguments]:
    own = {"patch_size": 1, "pooled_projection_dim": 32, "guidance_embeds": True}
    transformer = seeded(diffusers.FluxTransformer2DModel, **DUAL_STREAM, **own)
    vae = autoencoder(use_quant_conv=False, use_post_quant_conv=False)

    def arguments(prompts: Sequence[str], guidance_scale: float) -> Mapping[str, Any]:
        embeds, pooled = texts(prompts, 6, 32), texts(prompts, 32)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "guidance_scale": guidance_scale}

    return diffusers.FluxPipeline(flow_scheduler(), vae, None, None, None, None, transformer), arguments


def qwen_image() -> tuple[Any, Arguments]:
    transformer = seeded(
        diffusers.QwenImageTransformer2DModel,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    own = {"base_dim": 8, "dim_mult": [1, 2], "temperal_downsample": [False]}
    vae = seeded(diffusers.AutoencoderKLQwenImage, 1, **VIDEO_AUTOENCODER, **own)

    def arguments(prompts: Sequence[str], guidance_scale: float) -> Mapping[str, Any]:
        mask = torch.ones(len(prompts), 6, dtype=torch.long)
        return {
            "prompt_embeds": texts(prompts, 6, 16),
            "prompt_embeds_mask": mask,
            "negative_prompt_embeds": texts([""] * len(prompts), 6, 16),
            "negative_prompt_embeds_mask": mask,
            "true_cfg_scale": guidance_scale,
        }

    return diffusers.QwenImagePipeline(flow_scheduler(), vae, None, None, transformer), arguments


def z_image_transformer(**changes: Any) -> Any:
    given = {
        "all_patch_size": (2,),
        "all_f_patch_size": (1,),
        "in_channels": 16,
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 16,
        "axes_dims": [8, 4, 4],
        "axes_lens": [256, 32, 32],
        **changes,
    }
    transformer = seeded(diffusers.ZImageTransformer2DModel, **given)
    # Padding tokens are torch.empty, which may be NaN.
    for name, parameter in transformer.named_parameters():
        if name.endswith("pad_token"):
            torch.nn.init.normal_(parameter)
    return transformer


def z_image() -> tuple[Any, Arguments]:
    transformer, vae = z_image_transformer(), autoencoder(latent_channels=16)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)

    def arguments(prompts: Sequence[str], guidance_scale: float) -> Mapping[str, Any]:
        return {
            "prompt_embeds": list(texts(prompts, 6, 16)),
            "negative_prompt_embeds": list(texts([""] * len(prompts), 6, 16)),
            "guidance_scale": guidance_scale,
        }

    return diffusers.ZImagePipeline(scheduler, vae, None, None, transformer), arguments


def glm_image() -> tuple[Any, Arguments]:
    return load_pipeline(str(GLM_IMAGE), dtype=torch.float32, device=torch.device("cpu")), dict


MAKE = {"sd3": sd3, "flux": flux, "qwen_image": qwen_image, "z_image": z_image, "glm_image": glm_image}
GUIDANCE = {"sd3": 4.5, "flux": 3.5, "qwen_image": 4.0, "z_image": 4.0, "glm_image": 1.5}


def settings(name: str = "sd3", **changes: Any) -> DenoisingSettings:
    given: dict[str, Any] = {
        "num_inference_steps": 6,
        "guidance_scale": GUIDANCE[name],
        "sde_window_range": (0, 4),
        "sde_window_size": 2,
        **changes,
    }
    if name != "glm_image":
        return DenoisingSettings(**given)
    size = size_of(name)
    return GlmImageSettings(height=size.height, width=size.width, **given)


def component(
    name: str = "sd3",
    chosen: DenoisingSettings | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    lora: bool = True,
    checkpointing: bool = False,
) -> DenoisingComponent:
    """Return a component whose adapters are away from zero, so that the policy is not its reference."""
    pipeline, arguments = MAKE[name]()
    pipeline.to(dtype=dtype)
    choice = TrainingChoice(
        LoraSettings(rank=4, alpha=8) if lora else None,
        gradient_checkpointing=checkpointing,
        reference="none" if lora else "device",
    )
    trained = train_model(pipeline.transformer, choice, base_name=name, default_targets=DECODER_LINEARS)
    if isinstance(trained, LoraModel):
        disturb(trained)
    chosen = chosen or settings(name)
    if name == "glm_image":
        return GlmImageDecoder(pipeline, chosen, trained)
    return RandomComponent(pipeline, chosen, trained, arguments=arguments)


@torch.no_grad()
def disturb(trained: LoraModel, scale: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in trained.trainable_parameters().values():
        parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter)


def request(
    prompt: str = "a red circle", samples: int = 4, *, window_start: int | None = 1, group: str = "g"
) -> GroupRequest:
    seed = zlib.crc32(f"{group} {prompt}".encode())
    return GroupRequest(
        prompt=prompt,
        sample_ids=tuple(f"{group}.s{index:02d}" for index in range(samples)),
        seeds=tuple(range(samples)),
        noise_seeds=(seed,) * samples,
        step_seeds=tuple(seed + 1 + index for index in range(samples)),
        size=SIZE,
        window_start=window_start,
    )


def drafts(name: str, size: ImageSize, rows: int, prompt: str = "a red circle") -> TokenBatch | None:
    """Return complete drafts for GLM-Image, random and one per row."""
    unit = read_pixel_unit(str(GLM_IMAGE)) if name == "glm_image" else None
    if unit is None:
        return None
    length = token_grids(size, unit).tokens
    tokens = torch.randint(73, (rows, length), generator=torch.Generator().manual_seed(3))
    return TokenBatch((prompt,) * rows, tokens, torch.ones(rows, length, dtype=torch.bool), 1.0)


def size_of(name: str) -> ImageSize:
    """Return a size at which GLM-Image's two clocks differ."""
    return ImageSize(128, 128) if name == "glm_image" else SIZE


def sampled(
    made: DenoisingComponent, name: str, samples: int = 4, window_start: int = 1
) -> tuple[DenoisingBatch, Tensor]:
    """Return the noisy steps of one group and their log-probs."""
    size = size_of(name)
    found = made.sample(
        [request(samples=samples, window_start=window_start)],
        drafts(name, size, samples),
        size=size,
        rows_per_call=samples,
    )[0].sampled
    assert found is not None
    assert isinstance(found.actions, DenoisingBatch)
    return found.actions, found.rollout_logprobs
