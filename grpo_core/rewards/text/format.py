"""Whether a completion has the required form: reasoning and answer in their tags, or any pattern.

One of the two rule-based rewards of DeepSeek-AI, 2025, "DeepSeek-R1: Incentivizing Reasoning Capability in LLMs via
Reinforcement Learning" (arXiv:2501.12948), section 2.2.2; with the IoU of a box, of Xu et al., 2025, "MedGround-R1"
(arXiv:2507.02994).
"""

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal

import regex
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.modality import Modality
from grpo_core.rewards.reward import STRICT, Reward, Score, ScoringBatch, Text
from grpo_core.visible_text import has_visible_text

FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType({"think_answer": ("think", "answer")})
"""Elements of each named format, in order."""

DEFAULT_FORMAT = "think_answer"

MAX_SECONDS = 1.0
"""How long one completion may be matched; some patterns take ages over some texts."""


@dataclass(frozen=True, config=STRICT)
class FormatReward(Reward):
    """1 if the complete text has the form, else 0; in mode partial, the share of the form that is present.

    ``think_answer`` is ``<think>...</think><answer>...</answer>``: each of the four tags exactly once and in this
    order, something visible between the tags of a pair (white space, zero-width and control characters are not), and
    only white space outside them.

    In mode partial the parts are the tags, each of which must be there exactly once, and the complete form. Raw is
    the number of parts that are right: up to 5 for ``think_answer`` in either mode, 0 or 1 for a pattern.

    Attributes:
        format: a named format; ``think_answer`` unless a pattern is given.
        pattern: a regular expression, in its place, that must match the completion from end to end; a dot matches line
            breaks too.
        mode: ``strict``, or ``partial`` for a named format.
    """

    format: Literal["think_answer"] | None = None
    pattern: Text | None = None
    mode: Literal["strict", "partial"] = "strict"

    name: ClassVar[str] = "format"
    media: ClassVar[tuple[Modality, ...]] = ("text",)
    version: ClassVar[str] = "2"

    def __post_init__(self) -> None:
        if self.pattern is None:
            return
        if self.format is not None:
            raise InputError("rewards.format.pattern", self.pattern, "Set a pattern or a format, not both.")
        if self.mode == "partial":
            hint = "A pattern matches or it does not: set strict, or take a named format."
            raise InputError("rewards.format.mode", self.mode, hint)
        try:
            _compiled(self.pattern)
        except regex.error as error:
            hint = f"It is not a regular expression: {error}."
            raise InputError("rewards.format.pattern", self.pattern, hint) from error

    def settings(self) -> Mapping[str, object]:
        """Return the form that counts, and the mode."""
        named = None if self.pattern is not None else self.format or DEFAULT_FORMAT
        return {"format": named, "pattern": self.pattern, "mode": self.mode}

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; a failure where the pattern took more than MAX_SECONDS over it."""
        return [self._score_text(completion) for completion in batch.completions]

    def _score_text(self, completion: str) -> Score:
        if self.pattern is not None:
            try:
                matched = _compiled(self.pattern).fullmatch(completion, timeout=MAX_SECONDS) is not None
            except TimeoutError:
                return Score.failed(f"the pattern took more than {MAX_SECONDS:g} s over {len(completion)} characters")
            return Score(float(matched), float(matched))
        elements = FORMATS[self.format or DEFAULT_FORMAT]
        fits, tags = has_elements(completion, elements), tags_present_once(completion, elements)
        value = (tags + fits) / (2 * len(elements) + 1) if self.mode == "partial" else float(fits)
        return Score(value, float(tags + fits))


def tags_present_once(text: str, elements: Sequence[str]) -> int:
    """Count the opening and closing tags of these elements that the text has exactly once."""
    return sum(text.count(tag) == 1 for tag in _tags(elements))


def has_elements(text: str, elements: Sequence[str]) -> bool:
    """Say whether the text is these elements in this order, each once and not blank, with only white space around."""
    tags = _tags(elements)
    if any(text.count(tag) != 1 for tag in tags):
        return False
    parts, rest = [], text
    for tag in tags:
        before, found, rest = rest.partition(tag)
        if not found:
            return False
        parts.append(before)
    parts.append(rest)
    # Alternately outside an element and inside one.
    return not any(part.strip() for part in parts[::2]) and all(map(has_visible_text, parts[1::2]))


def _tags(elements: Sequence[str]) -> list[str]:
    return [tag for element in elements for tag in (f"<{element}>", f"</{element}>")]


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern, regex.DOTALL)
