"""Random pipelines of the real classes, small enough to run in milliseconds, and components over them."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from grpo_core.actions import DenoisingBatch, TokenBatch
from grpo_core.policies.denoising.component import DenoisingComponent
from grpo_core.policies.denoising.settings import DenoisingSettings
from grpo_core.policies.glm_image.decoding import GlmImageDecoder
from grpo_core.policies.glm_image.loading import load_pipeline
from grpo_core.policies.glm_image.settings import GlmImageSettings, read_pixel_unit, token_grids
from grpo_core.policies.trained.lora_and_full import LoraModel, train_model
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.records import GroupRequest
from grpo_core.streams import ImageSize

PIPELINES = ("sd3", "flux", "qwen_image", "z_image", "glm_image")
SIZE = ImageSize(32, 32)
DECODER_LINEARS = r".*(to_q|to_k|to_v|to_out\.0)"
GLM_IMAGE = Path(__file__).parents[4] / "data" / "models" / "tiny-glm-image"
EXPONENTIAL = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}


def embedded(text: str, *shape: int) -> Tensor:
    """Return numbers that depend on the text alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(text.encode())))


class RandomComponent(DenoisingComponent):
    """A pipeline without text encoders; a prompt's embeddings are random numbers."""

    def __init__(self, pipeline: Any, *args: Any, arguments: Callable[..., Mapping[str, Any]], **options: Any) -> None:
        super().__init__(pipeline, *args, **options)
        self.arguments = arguments

    def call_arguments(
        self, prompts: Sequence[str], drafts: TokenBatch | None, size: ImageSize, sources: tuple[Any, ...] = ()
    ) -> Mapping[str, Any]:
        found = self.arguments(prompts, self.settings.guidance_scale, next(self.trained.model.parameters()).dtype)
        return {"height": size.height, "width": size.width, **found}


def autoencoder(**changes: Any) -> Any:
    torch.manual_seed(1)
    return diffusers.AutoencoderKL(
        **{
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "block_out_channels": (4, 4),
            "layers_per_block": 1,
            "norm_num_groups": 2,
            "scaling_factor": 1.5,
            "shift_factor": 0.05,
            "latent_channels": 4,
            **changes,
        }
    )


def sd3() -> tuple[Any, Callable[..., Mapping[str, Any]]]:
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
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
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer, scheduler, autoencoder(use_quant_conv=False, use_post_quant_conv=False), *(None,) * 6
    )

    def arguments(prompts: Sequence[str], guidance_scale: float, dtype: torch.dtype) -> Mapping[str, Any]:
        rows = len(prompts)
        return {
            "prompt_embeds": torch.stack([embedded(each, 6, 32) for each in prompts]).to(dtype),
            "pooled_prompt_embeds": torch.stack([embedded(each, 64) for each in prompts]).to(dtype),
            "negative_prompt_embeds": embedded("", 6, 32).expand(rows, -1, -1).to(dtype),
            "negative_pooled_prompt_embeds": embedded("", 64).expand(rows, -1).to(dtype),
            "guidance_scale": guidance_scale,
        }

    return pipeline, arguments


def flux() -> tuple[Any, Callable[..., Mapping[str, Any]]]:
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**EXPONENTIAL)
    vae = autoencoder(use_quant_conv=False, use_post_quant_conv=False)
    pipeline = diffusers.FluxPipeline(scheduler, vae, None, None, None, None, transformer)

    def arguments(prompts: Sequence[str], guidance_scale: float, dtype: torch.dtype) -> Mapping[str, Any]:
        return {
            "prompt_embeds": torch.stack([embedded(each, 6, 32) for each in prompts]).to(dtype),
            "pooled_prompt_embeds": torch.stack([embedded(each, 32) for each in prompts]).to(dtype),
            "guidance_scale": guidance_scale,
        }

    return pipeline, arguments


def qwen_image() -> tuple[Any, Callable[..., Mapping[str, Any]]]:
    torch.manual_seed(0)
    transformer = diffusers.QwenImageTransformer2DModel(
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
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**EXPONENTIAL)
    torch.manual_seed(1)
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1] * 4,
        latents_std=[0.9] * 4,
    )
    pipeline = diffusers.QwenImagePipeline(scheduler, vae, None, None, transformer)

    def arguments(prompts: Sequence[str], guidance_scale: float, dtype: torch.dtype) -> Mapping[str, Any]:
        rows = len(prompts)
        return {
            "prompt_embeds": torch.stack([embedded(each, 6, 16) for each in prompts]).to(dtype),
            "prompt_embeds_mask": torch.ones(rows, 6, dtype=torch.long),
            "negative_prompt_embeds": embedded("", 6, 16).expand(rows, -1, -1).to(dtype),
            "negative_prompt_embeds_mask": torch.ones(rows, 6, dtype=torch.long),
            "true_cfg_scale": guidance_scale,
        }

    return pipeline, arguments


def z_image() -> tuple[Any, Callable[..., Mapping[str, Any]]]:
    torch.manual_seed(0)
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        norm_eps=1e-5,
        qk_norm=True,
        cap_feat_dim=16,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    # Padding tokens are torch.empty, which may be NaN.
    for name, parameter in transformer.named_parameters():
        if name.endswith("pad_token"):
            torch.nn.init.normal_(parameter)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    vae = autoencoder(latent_channels=16)
    pipeline = diffusers.ZImagePipeline(scheduler, vae, None, None, transformer)

    def arguments(prompts: Sequence[str], guidance_scale: float, dtype: torch.dtype) -> Mapping[str, Any]:
        return {
            "prompt_embeds": [embedded(each, 6, 16).to(dtype) for each in prompts],
            "negative_prompt_embeds": [embedded("", 6, 16).to(dtype) for _ in prompts],
            "guidance_scale": guidance_scale,
        }

    return pipeline, arguments


def glm_image() -> tuple[Any, Callable[..., Mapping[str, Any]]]:
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
