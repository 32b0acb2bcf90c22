"""A GLM-Image of the stock transformers and diffusers classes, small enough to train and run on one CPU core.

    recipe       all hyperparameters
    components   the seven parts of the pipeline with fresh weights, and the folder that diffusers loads
    training     the imperfect images, supervised training of the token model, flow matching of the decoder
    evaluation   accuracy and similarity on held-out captions

The whole recipe: ``build_pipeline``, ``train_autoregressive``, ``train_decoder``, ``save_tiny_model``,
``evaluate_tiny_model``.
"""

from data.tiny_glm_image.components import LIBRARIES, build_pipeline, save_tiny_model
from data.tiny_glm_image.evaluation import evaluate_tiny_model
from data.tiny_glm_image.recipe import TinyRecipe
from data.tiny_glm_image.training import AutoregressiveMetrics, train_autoregressive, train_decoder

__all__ = [
    "LIBRARIES",
    "AutoregressiveMetrics",
    "TinyRecipe",
    "build_pipeline",
    "evaluate_tiny_model",
    "save_tiny_model",
    "train_autoregressive",
    "train_decoder",
]
