"""The task of the tiny text model: sort the letters of a made-up word; and its prompt files."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.tiny_text.recipe import TinyTextRecipe

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SHORTEST, _LONGEST = 3, 8
INSTRUCTION = "sort the letters of"


def prompt_of(word: str) -> str:
    """Return the prompt, for example "sort the letters of tomato"."""
    return f"{INSTRUCTION} {word}"


def answer_of(word: str) -> str:
    """Return the correct answer, for example "amoott"."""
    return "".join(sorted(word))


def draw_words(count: int, rng: np.random.Generator, *, without: Sequence[str] = ()) -> tuple[str, ...]:
    """Draw distinct words of three to eight alternating consonants and vowels, none of them in `without`."""
    seen = set(without)
    words: list[str] = []
    while len(words) < count:
        word = _draw_word(rng)
        if word not in seen:
            seen.add(word)
            words.append(word)
    return tuple(words)


def _draw_word(rng: np.random.Generator) -> str:
    first = int(rng.integers(2))
    kinds = [(_CONSONANTS, _VOWELS)[(first + place) % 2] for place in range(rng.integers(_SHORTEST, _LONGEST + 1))]
    return "".join(letters[rng.integers(len(letters))] for letters in kinds)


def split_words(seed: int, *, train: int, heldout: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return words for training and held-out words; the held-out ones do not depend on the number of others."""
    unseen = draw_words(heldout, np.random.default_rng([seed, 1]))
    return draw_words(train, np.random.default_rng([seed, 2]), without=unseen), unseen


TRAIN_FILE = "letters_train.jsonl"
HELDOUT_FILE = "letters_heldout.jsonl"


def write_prompt_files(recipe: TinyTextRecipe, folder: Path) -> None:
    """Write one JSON object per word, with the columns prompt, answer and word.

    The supervised training uses the training words, with slips, and none of the held-out ones.

    Args:
        recipe: number of words, and their seed.
        folder: of the prompt files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen, unseen = split_words(recipe.seed, train=recipe.train_prompts, heldout=recipe.heldout_words)
    for name, words in ((TRAIN_FILE, seen), (HELDOUT_FILE, unseen[: recipe.heldout_prompts])):
        rows = ({"prompt": prompt_of(word), "answer": answer_of(word), "word": word} for word in words)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
