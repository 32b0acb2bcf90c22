"""The small CLIP of the embedding rewards' tests."""

from tests.grpo_core.rewards.embedding.conftest import clip_config, clip_oracle, clip_weights

__all__ = ["clip_config", "clip_oracle", "clip_weights"]
