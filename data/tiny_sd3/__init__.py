"""A Stable Diffusion 3 of the stock transformers and diffusers classes, small enough to train and run on one CPU core.

    components   all hyperparameters, and the parts of the pipeline with fresh weights
    training     flow matching of the diffusion transformer on imperfect images, and the quality on held-out captions

The whole recipe: ``build_pipeline``, ``train_transformer``, ``pipeline.save_pretrained``, ``evaluate_tiny_sd3``.
"""

from data.tiny_sd3.components import LIBRARIES, TinySd3Recipe, build_pipeline
from data.tiny_sd3.training import evaluate_tiny_sd3, train_transformer

__all__ = ["LIBRARIES", "TinySd3Recipe", "build_pipeline", "evaluate_tiny_sd3", "train_transformer"]
