"""The task of the tiny text model: sort the letters of a made-up word."""

from collections.abc import Sequence

import numpy as np

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_SHORTEST, _LONGEST = 3, 8
INSTRUCTION = "sort the letters of"


def prompt_of(word: str) -> str:
    """What is asked, for example "sort the letters of tomato"."""
    return f"{INSTRUCTION} {word}"


def answer_of(word: str) -> str:
    """What is right, for example "amoott"."""
    return "".join(sorted(word))


def draw_words(count: int, rng: np.random.Generator, *, without: Sequence[str] = ()) -> tuple[str, ...]:
    """Distinct words of three to eight letters, consonants and vowels by turns, none of them in `without`."""
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
    """Words for training, and words that no training shows; the held-out ones do not depend on how many train."""
    unseen = draw_words(heldout, np.random.default_rng([seed, 1]))
    return draw_words(train, np.random.default_rng([seed, 2]), without=unseen), unseen
