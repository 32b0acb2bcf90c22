"""Writes a trained tiny text model as an ordinary transformers folder."""

from pathlib import Path

import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
"""Whose versions decide what comes of the recipe."""


def save_tiny_text_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Saves model and tokenizer; `AutoModelForCausalLM.from_pretrained(folder)` loads it without this project."""
    # Its bars would tear the training's own.
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
