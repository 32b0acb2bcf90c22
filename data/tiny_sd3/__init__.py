"""A Stable Diffusion 3 of the stock transformers and diffusers classes, small enough to train and run on one CPU core.

    recipe       all hyperparameters
    components   the parts of the pipeline with fresh weights, and the folder that diffusers loads
    training     flow matching of the diffusion transformer on imperfect images
    evaluation   accuracy and similarity on held-out captions

The whole recipe: ``build_pipeline``, ``train_transformer``, ``save_tiny_sd3``, ``evaluate_tiny_sd3``.
"""

from data.tiny_sd3.components import LIBRARIES, build_pipeline, save_tiny_sd3
from data.tiny_sd3.evaluation import evaluate_tiny_sd3
from data.tiny_sd3.recipe import TinySd3Recipe
from data.tiny_sd3.training import train_transformer

__all__ = [
    "LIBRARIES",
    "TinySd3Recipe",
    "build_pipeline",
    "evaluate_tiny_sd3",
    "save_tiny_sd3",
    "train_transformer",
]
