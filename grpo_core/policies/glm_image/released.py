"""The released zai-org/GLM-Image as configurations, for what must be known of it where its files are not at hand.

Source: config.json of `vision_language_encoder`, `transformer` and `vae` on the hub. The glyph encoder has no
published page that could be read; it is the encoder of google/byt5-small (Xue et al., 2022, arXiv:2105.13626), whose
width is the decoder's `text_embed_dim` and whose size in fp32 is that of the released file.
"""

from transformers import GlmImageConfig, T5Config

from grpo_core.policies.glm_image.component_configs import ComponentConfigs

RELEASED_MODEL = "zai-org/GLM-Image"


def released_configs() -> ComponentConfigs:
    """Configurations of the released model: 10.1 B parameters of the token model, 6.93 B of the decoder."""
    return ComponentConfigs(
        autoregressive=_autoregressive(),
        decoder={
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 30,
            "attention_head_dim": 128,
            "num_attention_heads": 32,
            "text_embed_dim": 1472,
            "time_embed_dim": 512,
            "condition_dim": 256,
            "prior_vq_quantizer_codebook_size": 16384,
        },
        vae={
            "latent_channels": 16,
            "block_out_channels": (128, 512, 1024, 1024),
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "layers_per_block": 3,
            "mid_block_add_attention": False,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            "sample_size": 1024,
        },
        text_encoder=T5Config(
            vocab_size=384,
            d_model=1472,
            d_kv=64,
            d_ff=3584,
            num_layers=12,
            num_heads=6,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        ),
    )


def _autoregressive() -> GlmImageConfig:
    # Spelled out, so that a library whose defaults change does not change what is said of the release.
    return GlmImageConfig(
        text_config={
            "vocab_size": 168064,
            "vision_vocab_size": 16512,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [8, 12, 12],
            },
        },
        vision_config={
            "depth": 40,
            "hidden_size": 1536,
            "num_heads": 16,
            "intermediate_size": 6144,
            "image_size": 2048,
            "patch_size": 16,
        },
        vq_config={"embed_dim": 2048, "num_embeddings": 16384, "latent_channels": 1536},
    )
