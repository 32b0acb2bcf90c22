"""Random pipelines of further classes that make images of text alone; all that are tried, by name and by class."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers

from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from tests.grpo_core.policies.denoising.tiny_pipelines import autoencoder
from tests.grpo_core.policies.diffusers.tiny_classes import (
    MAKE_CLASS,
    add_image_tokens,
    eightfold_autoencoder,
    flow_scheduler,
    listed_template,
    settings_of,
    started_tokenizer,
)
from tests.grpo_core.policies.diffusers.tiny_pipelines import (
    MAKE,
    qwen_config,
    qwen_image,
    qwen_tokenizer,
    settings,
    t5_encoder,
    t5_tokenizer,
)


def aura_flow() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=32,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pos_embed_max_size=256,
    )
    encoder = transformers.UMT5EncoderModel(
        transformers.UMT5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, is_encoder_decoder=False
        )
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return diffusers.AuraFlowPipeline(t5_tokenizer(), encoder, autoencoder(), transformer, scheduler)


def bria_fibo() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.BriaFiboTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[4, 4, 8],
        text_encoder_dim=16,
    )
    torch.manual_seed(1)
    vae = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False] * 4,
        latents_mean=[0.1] * 4,
        latents_std=[0.9] * 4,
    )
    # An empty prompt is one id, of the released vocabulary.
    ids = {"vocab_size": 128_001, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    encoder = transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**{**qwen_config(), **ids}))
    return diffusers.BriaFiboPipeline(transformer, flow_scheduler(), vae, encoder, started_tokenizer())


def chroma() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.ChromaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    return diffusers.ChromaPipeline(flow_scheduler(), autoencoder(), t5_encoder(32), t5_tokenizer(), transformer)


def _qwen3_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "deepstack_visual_indexes": [0],
    }
    text = {**qwen_config(), "rope_parameters": rope, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision)


def krea2() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 4, 8),
    )
    return diffusers.Krea2Pipeline(
        flow_scheduler(),
        qwen_image().vae,
        transformers.Qwen3VLModel(_qwen3_vl()),
        qwen_tokenizer(),
        transformer,
        text_encoder_select_layers=(0, 2),
    )


def lumina2() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=16,
        in_channels=4,
        hidden_size=24,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(512, 32, 32),
        cap_feat_dim=16,
    )
    encoder = transformers.Gemma2Model(transformers.Gemma2Config(**qwen_config()))
    return diffusers.Lumina2Pipeline(
        transformer, flow_scheduler(), eightfold_autoencoder(), encoder, started_tokenizer()
    )


_TEXT = "(m.content if m.content is string else m.content[0].text)"


def nucleus_moe() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=5,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
        mlp_ratio=8.0,
        num_experts=2,
        moe_intermediate_dim=16,
        capacity_factors=1.0,
    )
    # Its experts start with values of one.
    for parameter in transformer.parameters():
        if parameter.ndim == 3:
            torch.nn.init.normal_(parameter, std=0.2)
    config = _qwen3_vl()
    # It reads the last hidden states but seven.
    config.text_config.num_hidden_layers = 8
    tokenizer = listed_template(qwen_tokenizer())
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content[0].text", _TEXT)
    add_image_tokens(tokenizer)
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
    encoder = transformers.Qwen3VLForConditionalGeneration(config)
    return diffusers.NucleusMoEImagePipeline(transformer, flow_scheduler(), qwen_image().vae, encoder, processor)


def ovis_image() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    encoder = transformers.Qwen3Model(transformers.Qwen3Config(**qwen_config()))
    return diffusers.OvisImagePipeline(flow_scheduler(), autoencoder(), encoder, qwen_tokenizer(), transformer)


MAKE_TEXT_CLASS: dict[str, Callable[[], Any]] = {
    "aura_flow": aura_flow,
    "bria_fibo": bria_fibo,
    "chroma": chroma,
    "krea2": krea2,
    "lumina2": lumina2,
    "nucleus_moe": nucleus_moe,
    "ovis_image": ovis_image,
}

MAKE_TRIED = {**MAKE, **MAKE_CLASS, **MAKE_TEXT_CLASS}

CLASSES = {
    "sd3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
    "qwen_image": "QwenImagePipeline",
    "z_image": "ZImagePipeline",
    "flux2": "Flux2Pipeline",
    "flux2_klein": "Flux2KleinPipeline",
    "flux_kontext": "FluxKontextPipeline",
    "qwen_image_edit": "QwenImageEditPipeline",
    "qwen_image_edit_plus": "QwenImageEditPlusPipeline",
    "z_image_omni": "ZImageOmniPipeline",
    "sana": "SanaPipeline",
    "cogview4": "CogView4Pipeline",
    "lumina": "LuminaPipeline",
    "bria": "BriaPipeline",
    "ernie_image": "ErnieImagePipeline",
    "aura_flow": "AuraFlowPipeline",
    "bria_fibo": "BriaFiboPipeline",
    "chroma": "ChromaPipeline",
    "krea2": "Krea2Pipeline",
    "lumina2": "Lumina2Pipeline",
    "nucleus_moe": "NucleusMoEImagePipeline",
    "ovis_image": "OvisImagePipeline",
}
"""The class of each."""


def settings_of_tried(name: str, **changes: Any) -> DiffusersSettings:
    """Settings for any of these."""
    return settings(name, **changes) if name in MAKE else settings_of(name, **changes)
