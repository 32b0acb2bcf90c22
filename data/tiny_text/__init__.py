"""A text model of the stock transformers classes, small enough to train and run on one CPU core.

    recipe       every number that it depends on
    letters      its task: sort the letters of a made-up word
    tokenizer    one id an instruction word, bytes for any other text; the chat template
    model        a Llama with fresh weights
    corpus       the imperfect answers of the supervised training
    training     cross-entropy on the answers
    evaluation   how right its answers to held-out prompts are
    saving       the folder that transformers loads, and recipe.json
    prompts      the prompt files for training by rewards

The whole recipe: ``build_tokenizer``, ``build_model``, ``train_model``, ``save_tiny_text_model``,
``evaluate_tiny_text_model``, ``write_prompt_files``.
"""

from data.tiny_text.evaluation import TinyTextReport, evaluate_tiny_text_model
from data.tiny_text.model import build_model
from data.tiny_text.prompts import write_prompt_files
from data.tiny_text.recipe import TinyTextRecipe
from data.tiny_text.saving import LIBRARIES, save_tiny_text_model
from data.tiny_text.tokenizer import build_tokenizer
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
