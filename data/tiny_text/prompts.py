"""Writes the prompt files for training by rewards, with the right answer to each prompt."""

import json
from pathlib import Path

from data.tiny_text.letters import answer_of, prompt_of, split_words
from data.tiny_text.recipe import TinyTextRecipe

TRAIN_FILE = "letters_train.jsonl"
HELDOUT_FILE = "letters_heldout.jsonl"


def write_prompt_files(recipe: TinyTextRecipe, folder: Path) -> None:
    """Writes one JSON object a word, with the columns prompt, answer and word.

    The supervised training shows the training words, with slips, and none of the held-out ones.

    Args:
        recipe: how many, and the words' seed.
        folder: that holds the prompt files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen, unseen = split_words(recipe.seed, train=recipe.train_prompts, heldout=recipe.heldout_words)
    for name, words in ((TRAIN_FILE, seen), (HELDOUT_FILE, unseen[: recipe.heldout_prompts])):
        rows = ({"prompt": prompt_of(word), "answer": answer_of(word), "word": word} for word in words)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
