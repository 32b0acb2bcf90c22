"""A text model of the stock transformers classes, small enough to train and run on one CPU core.

    recipe       all hyperparameters
    letters      its task, sorting the letters of a made-up word, and its prompt files
    model        tokenizer with chat template, a Llama with fresh weights, the folder that transformers loads
    training     the imperfect answers of the supervised training, and cross-entropy on them
    evaluation   how often its answers to held-out prompts are right

The whole recipe: ``build_tokenizer``, ``build_model``, ``train_model``, ``save_tiny_text_model``,
``evaluate_tiny_text_model``, ``write_prompt_files``.
"""

from data.tiny_text.evaluation import TinyTextReport, evaluate_tiny_text_model
from data.tiny_text.letters import write_prompt_files
from data.tiny_text.model import LIBRARIES, build_model, build_tokenizer, save_tiny_text_model
from data.tiny_text.recipe import TinyTextRecipe
from data.tiny_text.training import TrainingMetrics, train_model

__all__ = [
    "LIBRARIES",
    "TinyTextRecipe",
    "TinyTextReport",
    "TrainingMetrics",
    "build_model",
    "build_tokenizer",
    "evaluate_tiny_text_model",
    "save_tiny_text_model",
    "train_model",
    "write_prompt_files",
]
