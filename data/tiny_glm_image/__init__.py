"""A GLM-Image of the stock transformers and diffusers classes, small enough to train and run on one CPU core.

    recipe           all hyperparameters
    components       the seven parts of the pipeline with fresh weights, and the folder that diffusers loads
    corpus           the imperfect images of the supervised training
    optimization     optimizer and schedule of both trainings
    autoregressive   supervised training of the token model
    decoder          flow matching of the diffusion transformer
    evaluation       accuracy and similarity on held-out captions

The whole recipe: ``build_pipeline``, ``train_autoregressive``, ``train_decoder``, ``save_tiny_model``,
``evaluate_tiny_model``.
"""

from data.tiny_glm_image.autoregressive import AutoregressiveMetrics, train_autoregressive
from data.tiny_glm_image.components import LIBRARIES, build_pipeline, save_tiny_model
from data.tiny_glm_image.decoder import DecoderMetrics, train_decoder
from data.tiny_glm_image.evaluation import TinyModelReport, evaluate_tiny_model
from data.tiny_glm_image.recipe import TinyRecipe

__all__ = [
    "LIBRARIES",
    "AutoregressiveMetrics",
    "DecoderMetrics",
    "TinyModelReport",
    "TinyRecipe",
    "build_pipeline",
    "evaluate_tiny_model",
    "save_tiny_model",
    "train_autoregressive",
    "train_decoder",
]
