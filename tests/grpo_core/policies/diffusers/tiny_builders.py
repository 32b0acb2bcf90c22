"""Random pipelines of every class that is tried, small enough to run in milliseconds.

`text_encoder_out_layers` of Flux.2 counts to layer 30, so its text encoders are deep and narrow.
"""

from typing import Any

import diffusers
import torch
import transformers

from tests.grpo_core.policies.denoising import tiny_pipelines as without_text
from tests.grpo_core.policies.denoising.tiny_pipelines import (
    AUTOENCODER,
    DUAL_STREAM,
    VIDEO_AUTOENCODER,
    autoencoder,
    flow_scheduler,
    seeded,
    z_image_transformer,
)
from tests.grpo_core.policies.diffusers.tiny_parts import (
    QWEN,
    T5,
    VISION,
    VISION_TOWER,
    add_image_tokens,
    clip_encoder,
    clip_tokenizer,
    eightfold_autoencoder,
    listed_template,
    qwen3,
    qwen_tokenizer,
    started_tokenizer,
    t5_encoder,
    t5_tokenizer,
)


def sd3() -> Any:
    bare, _ = without_text.sd3()
    clips = (clip_encoder(32), clip_tokenizer(), clip_encoder(32), clip_tokenizer())
    return diffusers.StableDiffusion3Pipeline(
        bare.transformer, bare.scheduler, bare.vae, *clips, t5_encoder(32), t5_tokenizer()
    )


def flux(pipeline_class: Any = diffusers.FluxPipeline) -> Any:
    bare, _ = without_text.flux()
    clip = transformers.CLIPTextModel(clip_encoder(32).config)
    return pipeline_class(
        bare.scheduler, bare.vae, clip, clip_tokenizer(), t5_encoder(32), t5_tokenizer(), bare.transformer
    )


def qwen_image() -> Any:
    bare, _ = without_text.qwen_image()
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2_5_VLConfig(text_config={**QWEN, "rope_parameters": rope}, vision_config=VISION_TOWER)
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(config)
    return diffusers.QwenImagePipeline(bare.scheduler, bare.vae, encoder, qwen_tokenizer(), bare.transformer)


def z_image() -> Any:
    bare, _ = without_text.z_image()
    return diffusers.ZImagePipeline(bare.scheduler, bare.vae, qwen3(), qwen_tokenizer(), bare.transformer)


def _flux2_autoencoder() -> Any:
    given = {name: each for name, each in AUTOENCODER.items() if name not in ("scaling_factor", "shift_factor")}
    return diffusers.AutoencoderKLFlux2(**given)


def _flux2_transformer(guidance_embeds: bool) -> Any:
    own = {"joint_attention_dim": 48, "timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)}
    return seeded(diffusers.Flux2Transformer2DModel, **{**DUAL_STREAM, **own}, guidance_embeds=guidance_embeds)


def _mistral3(layers: int) -> Any:
    text = transformers.MistralConfig(**{**QWEN, "num_hidden_layers": layers})
    vision = transformers.PixtralVisionConfig(**VISION, head_dim=8)
    return transformers.Mistral3Config(text_config=text, vision_config=vision)


def flux2() -> Any:
    encoder = transformers.Mistral3ForConditionalGeneration(_mistral3(31))
    tokenizer = listed_template(qwen_tokenizer())
    return diffusers.Flux2Pipeline(
        flow_scheduler(), _flux2_autoencoder(), encoder, tokenizer, _flux2_transformer(guidance_embeds=True)
    )


def flux2_klein() -> Any:
    encoder = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**QWEN, "num_hidden_layers": 28}))
    return diffusers.Flux2KleinPipeline(
        flow_scheduler(), _flux2_autoencoder(), encoder, qwen_tokenizer(), _flux2_transformer(guidance_embeds=False)
    )


def flux_kontext() -> Any:
    return flux(diffusers.FluxKontextPipeline)


def qwen_image_edit(pipeline_class: Any = diffusers.QwenImageEditPipeline) -> Any:
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


def qwen_image_edit_plus() -> Any:
    return qwen_image_edit(diffusers.QwenImageEditPlusPipeline)


def z_image_omni() -> Any:
    own = z_image()
    return diffusers.ZImageOmniPipeline(
        own.scheduler,
        own.vae,
        own.text_encoder,
        own.tokenizer,
        z_image_transformer(siglip_feat_dim=16, axes_lens=[256, 128, 128]),
        transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**VISION, patch_size=16, num_patches=16)),
        transformers.Siglip2ImageProcessor(patch_size=16, max_num_patches=16),
    )


def sana() -> Any:
    transformer = seeded(
        diffusers.SanaTransformer2DModel,
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
    blocks: dict[str, Any] = {
        "block_types": ("ResBlock", "EfficientViTBlock"),
        "block_out_channels": (8, 8),
        "qkv_multiscales": ((), (5,)),
        "layers_per_block": [1, 1],
    }
    vae = diffusers.AutoencoderDC(
        **{f"{side}_{name}": each for side in ("encoder", "decoder") for name, each in blocks.items()},
        latent_channels=4,
        attention_head_dim=2,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    encoder = transformers.Gemma2Model(transformers.Gemma2Config(**QWEN))
    return diffusers.SanaPipeline(qwen_tokenizer(), encoder, vae, transformer, scheduler)


def cogview4() -> Any:
    transformer = seeded(
        diffusers.CogView4Transformer2DModel,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
    )
    encoder = transformers.GlmModel(transformers.GlmConfig(**QWEN, pad_token_id=None))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
    )
    return diffusers.CogView4Pipeline(started_tokenizer(), encoder, autoencoder(), transformer, scheduler)


_LUMINA = {"sample_size": 16, "in_channels": 4, "hidden_size": 24, "num_layers": 1, "num_kv_heads": 1, "multiple_of": 8}


def lumina() -> Any:
    transformer = seeded(diffusers.LuminaNextDiT2DModel, **_LUMINA, num_attention_heads=3, cross_attention_dim=16)
    encoder = transformers.GemmaModel(transformers.GemmaConfig(**QWEN, pad_token_id=None))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.LuminaPipeline(transformer, scheduler, eightfold_autoencoder(), encoder, started_tokenizer())


def lumina2() -> Any:
    axes = {"axes_dim_rope": (4, 4, 4), "axes_lens": (512, 32, 32)}
    heads = {"num_refiner_layers": 1, "num_attention_heads": 2, "cap_feat_dim": 16}
    transformer = seeded(diffusers.Lumina2Transformer2DModel, **_LUMINA, **heads, **axes)
    encoder = transformers.Gemma2Model(transformers.Gemma2Config(**QWEN))
    vae = eightfold_autoencoder()
    return diffusers.Lumina2Pipeline(transformer, flow_scheduler(), vae, encoder, started_tokenizer())


def bria() -> Any:
    transformer = seeded(diffusers.BriaTransformer2DModel, **{**DUAL_STREAM, "axes_dims_rope": [4, 4, 8]})
    return diffusers.BriaPipeline(transformer, flow_scheduler(), autoencoder(), t5_encoder(32), t5_tokenizer())


def bria_fibo() -> Any:
    own = {"in_channels": 4, "axes_dims_rope": [4, 4, 8], "text_encoder_dim": 16}
    transformer = seeded(diffusers.BriaFiboTransformer2DModel, **{**DUAL_STREAM, **own})
    shape = {"base_dim": 4, "dim_mult": [1] * 5, "temperal_downsample": [False] * 4}
    vae = seeded(diffusers.AutoencoderKLWan, 1, **VIDEO_AUTOENCODER, **shape)
    # An empty prompt is one id, of the released vocabulary.
    ids = {"vocab_size": 128_001, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    encoder = transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**{**QWEN, **ids}))
    return diffusers.BriaFiboPipeline(transformer, flow_scheduler(), vae, encoder, started_tokenizer())


def ernie_image() -> Any:
    transformer = seeded(
        diffusers.ErnieImageTransformer2DModel,
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
    rewriter = transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**QWEN))
    return diffusers.ErnieImagePipeline(
        transformer,
        _flux2_autoencoder(),
        transformers.Mistral3Model(_mistral3(2)),
        qwen_tokenizer(),
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        rewriter,
        tokenizer,
    )


def aura_flow() -> Any:
    transformer = seeded(
        diffusers.AuraFlowTransformer2DModel,
        sample_size=32,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pos_embed_max_size=256,
    )
    config = transformers.UMT5Config(**T5, is_encoder_decoder=False)
    encoder, scheduler = transformers.UMT5EncoderModel(config), diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return diffusers.AuraFlowPipeline(t5_tokenizer(), encoder, autoencoder(), transformer, scheduler)


def chroma() -> Any:
    own = {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}
    transformer = seeded(diffusers.ChromaTransformer2DModel, **DUAL_STREAM, **own)
    return diffusers.ChromaPipeline(flow_scheduler(), autoencoder(), t5_encoder(32), t5_tokenizer(), transformer)


def ovis_image() -> Any:
    own = {"out_channels": 16, "joint_attention_dim": 16}
    transformer = seeded(diffusers.OvisImageTransformer2DModel, **{**DUAL_STREAM, **own})
    return diffusers.OvisImagePipeline(flow_scheduler(), autoencoder(), qwen3(), qwen_tokenizer(), transformer)


def _qwen3_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    text = {**QWEN, "rope_parameters": rope, "bos_token_id": 0, "eos_token_id": 0}
    vision = {**VISION_TOWER, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision)


def krea2() -> Any:
    transformer = seeded(
        diffusers.Krea2Transformer2DModel,
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
    parts = (qwen_image().vae, transformers.Qwen3VLModel(_qwen3_vl()), qwen_tokenizer(), transformer)
    return diffusers.Krea2Pipeline(flow_scheduler(), *parts, text_encoder_select_layers=(0, 2))


def nucleus_moe() -> Any:
    transformer = seeded(
        diffusers.NucleusMoEImageTransformer2DModel,
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
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m.content[0].text", "(m.content if m.content is string else m.content[0].text)"
    )
    add_image_tokens(tokenizer)
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
    encoder = transformers.Qwen3VLForConditionalGeneration(config)
    return diffusers.NucleusMoEImagePipeline(transformer, flow_scheduler(), qwen_image().vae, encoder, processor)
