"""Random pipelines of classes that need something of their own: another form of latents, a size, a scheduler's method.

`text_encoder_out_layers` of Flux.2 counts to layer 30, so its text encoders are deep and narrow.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from tests.grpo_core.policies.denoising.tiny_pipelines import EXPONENTIAL, autoencoder
from tests.grpo_core.policies.diffusers.tiny_pipelines import (
    SPECIAL,
    flux,
    qwen_config,
    qwen_image,
    qwen_tokenizer,
    settings,
    t5_encoder,
    t5_tokenizer,
    z_image,
)


def flow_scheduler() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**EXPONENTIAL)


def _flux2_autoencoder() -> Any:
    return diffusers.AutoencoderKLFlux2(
        latent_channels=4,
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=2,
    )


def _flux2_transformer(guidance_embeds: bool) -> Any:
    torch.manual_seed(0)
    return diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )


def _mistral3(layers: int) -> Any:
    text = transformers.MistralConfig(**{**qwen_config(), "num_hidden_layers": layers})
    vision = transformers.PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    return transformers.Mistral3Config(text_config=text, vision_config=vision)


def flux2() -> Any:
    encoder = transformers.Mistral3ForConditionalGeneration(_mistral3(31))
    return diffusers.Flux2Pipeline(
        flow_scheduler(), _flux2_autoencoder(), encoder, listed_template(qwen_tokenizer()), _flux2_transformer(True)
    )


def flux2_klein() -> Any:
    encoder = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**qwen_config(), "num_hidden_layers": 28}))
    return diffusers.Flux2KleinPipeline(
        flow_scheduler(), _flux2_autoencoder(), encoder, qwen_tokenizer(), _flux2_transformer(False)
    )


def started_tokenizer() -> Any:
    """A tokenizer that begins each text with a token of its own, so that an empty prompt has one."""
    tokenizer = qwen_tokenizer()
    start = (SPECIAL[1], tokenizer.convert_tokens_to_ids(SPECIAL[1]))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{SPECIAL[1]} $A", special_tokens=[start])
    return tokenizer


def listed_template(tokenizer: Any) -> Any:
    """Add a template for messages whose content is a list of texts."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content[0].text }}\n{% endfor %}"
    return tokenizer


def flux_kontext() -> Any:
    own = flux()
    return diffusers.FluxKontextPipeline(**own.components)


def add_image_tokens(tokenizer: Any) -> dict[str, int]:
    """Add the tokens that stand for images; return their ids by the names that configurations have for them."""
    ids = {}
    for name in ("image_pad", "video_pad", "vision_start", "vision_end"):
        tokenizer.add_tokens([f"<|{name}|>"], special_tokens=True)
        ids[f"{name.removesuffix('_pad')}_token_id"] = tokenizer.convert_tokens_to_ids(f"<|{name}|>")
    return ids


def _qwen_image_edit(pipeline_class: Any) -> Any:
    own = qwen_image()
    tokenizer, ids = own.tokenizer, add_image_tokens(own.tokenizer)
    config = own.text_encoder.config
    text = {**config.text_config.to_dict(), "bos_token_id": 0, "eos_token_id": 0}
    config = type(config)(text_config=text, vision_config=config.vision_config.to_dict(), **ids)
    # A patch of 28 pixels is one id.
    images = transformers.Qwen2VLImageProcessor(min_pixels=4 * 28**2, max_pixels=16 * 28**2)
    processor = transformers.Qwen2VLProcessor(images, tokenizer, transformers.Qwen2VLVideoProcessor())
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(config)
    return pipeline_class(own.scheduler, own.vae, encoder, tokenizer, processor, own.transformer)


def qwen_image_edit() -> Any:
    return _qwen_image_edit(diffusers.QwenImageEditPipeline)


def qwen_image_edit_plus() -> Any:
    return _qwen_image_edit(diffusers.QwenImageEditPlusPipeline)


def z_image_omni() -> Any:
    own = z_image()
    config = {name: each for name, each in own.transformer.config.items() if not name.startswith("_")}
    torch.manual_seed(0)
    transformer = diffusers.ZImageTransformer2DModel(**{**config, "siglip_feat_dim": 16, "axes_lens": [256, 128, 128]})
    for name, parameter in transformer.named_parameters():
        if name.endswith("pad_token"):
            torch.nn.init.normal_(parameter)
    vision = transformers.Siglip2VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=16, num_patches=16
    )
    return diffusers.ZImageOmniPipeline(
        own.scheduler,
        own.vae,
        own.text_encoder,
        own.tokenizer,
        transformer,
        transformers.Siglip2VisionModel(vision),
        transformers.Siglip2ImageProcessor(patch_size=16, max_num_patches=16),
    )


def sana() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=32,
    )
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=[1, 1],
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    encoder = transformers.Gemma2Model(transformers.Gemma2Config(**qwen_config()))
    return diffusers.SanaPipeline(qwen_tokenizer(), encoder, vae, transformer, scheduler)


def cogview4() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
    )
    encoder = transformers.GlmModel(transformers.GlmConfig(**qwen_config(), pad_token_id=None))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
    )
    return diffusers.CogView4Pipeline(started_tokenizer(), encoder, autoencoder(), transformer, scheduler)


def lumina() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.LuminaNextDiT2DModel(
        sample_size=16,
        in_channels=4,
        hidden_size=24,
        num_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=8,
        cross_attention_dim=16,
    )
    encoder = transformers.GemmaModel(transformers.GemmaConfig(**qwen_config(), pad_token_id=None))
    return diffusers.LuminaPipeline(
        transformer, diffusers.FlowMatchEulerDiscreteScheduler(), eightfold_autoencoder(), encoder, started_tokenizer()
    )


def eightfold_autoencoder() -> Any:
    """An autoencoder of 8 pixels a latent, which some pipelines count on."""
    return autoencoder(
        block_out_channels=(4,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )


def bria() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.BriaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return diffusers.BriaPipeline(transformer, flow_scheduler(), autoencoder(), t5_encoder(32), t5_tokenizer())


def ernie_image(rewrites: bool = True) -> Any:
    torch.manual_seed(0)
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=1,
        ffn_hidden_size=32,
        in_channels=16,
        out_channels=16,
        text_in_dim=16,
        rope_axes_dim=(4, 4, 8),
    )
    # Layers that start at zero would let nothing through.
    for parameter in transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.2)
    tokenizer = qwen_tokenizer()
    # What the rewriter writes at most.
    tokenizer.model_max_length = 8
    rewriter = transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**qwen_config()))
    return diffusers.ErnieImagePipeline(
        transformer,
        _flux2_autoencoder(),
        transformers.Mistral3Model(_mistral3(2)),
        qwen_tokenizer(),
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        rewriter if rewrites else None,
        tokenizer if rewrites else None,
    )


MAKE_CLASS: dict[str, Callable[[], Any]] = {
    "flux2": flux2,
    "flux2_klein": flux2_klein,
    "flux_kontext": flux_kontext,
    "qwen_image_edit": qwen_image_edit,
    "qwen_image_edit_plus": qwen_image_edit_plus,
    "z_image_omni": z_image_omni,
    "sana": sana,
    "cogview4": cogview4,
    "lumina": lumina,
    "bria": bria,
    "ernie_image": ernie_image,
}

# A letter is an id, and some templates have more letters than the prompt.
_LENGTHS = {
    "flux2": 400,
    "sana": 200,
    "ernie_image": None,
    "qwen_image_edit": 512,
    "qwen_image_edit_plus": 512,
    "krea2": 300,
    "lumina2": 300,
    "nucleus_moe": None,
}

# Those that make no image without a source.
NEED_SOURCES = ("qwen_image_edit", "qwen_image_edit_plus")

# Those that also edit; the one of two takes one image a prompt, the other any number.
EDITS = ("flux_kontext", "flux2", "flux2_klein", *NEED_SOURCES, "z_image_omni")
SEVERAL = ("flux2", "flux2_klein", "qwen_image_edit_plus", "z_image_omni")


@contextmanager
def reduced_sources(class_name: str) -> Iterator[None]:
    """Let a pipeline that scales source images to a megapixel make them small in this context."""
    module = inspect.getmodule(getattr(diffusers, class_name))
    own = getattr(module, "calculate_dimensions", None)
    with pytest.MonkeyPatch.context() as patch:
        if own is not None:
            patch.setattr(module, "calculate_dimensions", lambda area, ratio: own(min(area, 64**2), ratio))
        yield


def settings_of(name: str, **changes: Any) -> DiffusersSettings:
    """Settings for one of these; guidance is embedded or classifier-free."""
    side = 64 if name.startswith("lumina") else 32
    given = {"height": side, "width": side, "guidance_scale": 4.0, "max_sequence_length": _LENGTHS.get(name, 64)}
    return settings(**{**given, **changes})
