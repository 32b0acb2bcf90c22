"""Rewards of completions by rule: nearness to a given answer, and the required form.

The two rule-based rewards of DeepSeek-AI, 2025, "DeepSeek-R1: Incentivizing Reasoning Capability in LLMs via
Reinforcement Learning" (arXiv:2501.12948), section 2.2.2. The form with a box is that of Xu et al., 2025,
"MedGround-R1" (arXiv:2507.02994).
"""

import functools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

import regex
from pydantic.dataclasses import dataclass
from rapidfuzz.distance import Levenshtein

from grpo_core.errors import InputError
from grpo_core.rewards.reward import STRICT, Needs, Reward, Text
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch
from grpo_core.rollouts.messages import answer_begun
from grpo_core.rollouts.streams import has_visible_text
from grpo_core.uses import Uses


@dataclass(frozen=True, config=STRICT)
class AnswerReward(Reward):
    """1 - edit distance / length of the longer of the two (Levenshtein, 1966), or 1 for the very same and 0 otherwise.

    White space at both ends does not count.

    Attributes:
        column: the prompt file's column with the answer; a sample without one has no score.
        mode: ``similarity`` or ``exact``.
    """

    column: Annotated[Text, Uses.NOTHING] = "answer"
    mode: Literal["similarity", "exact"] = "similarity"

    name: ClassVar[str] = "answer"
    version: ClassVar[str] = "1"

    @property
    def needs(self) -> Needs:
        """The column of the answer."""
        return Needs(("text",), column=self.column)

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; raw is the number of edits."""
        answers = batch.columns.get(self.column, [None] * len(batch))
        samples = zip(batch.sample_ids, batch.completions, answers, strict=True)
        return [self._score_text(sample_id, completion, answer) for sample_id, completion, answer in samples]

    def check_prompt(self, columns: Mapping[str, object], sizes: Sequence[tuple[int, int]], prompt: str = "") -> None:
        """Refuse an answer that is neither text nor a whole number."""
        self._refuse_other(columns.get(self.column), f"column {self.column}")

    @staticmethod
    def _refuse_other(answer: object, place: str) -> None:
        # Digits are the text of a whole number; those of another number are not known any more.
        if isinstance(answer, bool) or not isinstance(answer, str | int | None):
            hint = (
                "Write the answer as text: in JSON in quotes, in CSV and TSV in a column named answer or solution, "
                "which stay text."
            )
            raise InputError(place, answer, hint)

    def _score_text(self, sample_id: str, completion: str, answer: object) -> Score:
        if answer is None:
            return NOT_APPLICABLE
        self._refuse_other(answer, f"rewards.answer, sample {sample_id}, column {self.column}")
        given, wanted = completion.strip(), str(answer).strip()
        edits = Levenshtein.distance(given, wanted)
        if self.mode == "exact":
            return Score(float(edits == 0), float(edits))
        return Score(1.0 - edits / max(len(given), len(wanted), 1), float(edits))


FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"think_answer": ("think", "answer"), "think_answer_box": ("think", "answer")}
)
"""Elements of each named format, in order."""

WITH_BOX = frozenset({"think_answer_box"})
"""Formats whose last element must contain a box."""

_WHOLE_NUMBERS = re.compile(r"\[[0-9]+,\s*[0-9]+,\s*[0-9]+,\s*[0-9]+\]")

DEFAULT_FORMAT = "think_answer"

MAX_SECONDS = 1.0
"""How long one completion may be matched; some patterns take ages over some texts."""


@dataclass(frozen=True, config=STRICT)
class FormatReward(Reward):
    """1 if the complete text has the form, else 0; in mode partial, the share of the form that is present.

    ``think_answer`` is ``<think>...</think><answer>...</answer>``: each of the four tags exactly once and in this
    order, something visible between the tags of a pair (not white space, zero-width, control or unassigned characters
    or a comment, ``<!-- -->``), and only white space outside them. ``think_answer_box`` is MedGround-R1's: the same,
    with a list of four whole numbers in braces in the answer, such as ``{"bbox_2d": [10, 20, 30, 40]}``.

    What the chat template or the prompt's last message begins the text with, such as ``<think>``, counts too.

    In mode partial the parts are the tags, each exactly once, the elements, and the box. Raw is the number of parts
    that are right: up to 5 for ``think_answer``, 6 with a box, in either mode; 0 or 1 for a pattern.

    Attributes:
        format: a named format; ``think_answer`` unless a pattern is given.
        pattern: a regular expression, in its place, that must match the completion from end to end; a dot matches line
            breaks too.
        mode: ``strict``, or ``partial`` for a named format.
    """

    format: Literal["think_answer", "think_answer_box"] | None = None
    pattern: Annotated[Text | None, Uses.NOTHING] = None
    mode: Literal["strict", "partial"] = "strict"

    name: ClassVar[str] = "format"
    needs: ClassVar[Needs] = Needs(("text",))
    version: ClassVar[str] = "4"

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
        begun = zip(batch.prompts, batch.starts or [""] * len(batch), batch.completions, strict=True)
        return [self._score_text((answer_begun(prompt) or start) + text) for prompt, start, text in begun]

    def _score_text(self, completion: str) -> Score:
        if self.pattern is not None:
            try:
                matched = _compiled(self.pattern).fullmatch(completion, timeout=MAX_SECONDS) is not None
            except TimeoutError:
                return Score.failed(f"the pattern took more than {MAX_SECONDS:g} s over {len(completion)} characters")
            return Score(float(matched), float(matched))
        named = self.format or DEFAULT_FORMAT
        elements = FORMATS[named]
        parts = [has_elements(completion, elements)]
        if named in WITH_BOX:
            parts.append(has_box(completion, elements[-1]))
        right = tags_present_once(completion, elements) + sum(parts)
        value = right / (2 * len(elements) + len(parts)) if self.mode == "partial" else float(all(parts))
        return Score(value, float(right))


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
    return not any(part.strip() for part in parts[::2]) and all(map(_shows_something, parts[1::2]))


def has_box(text: str, element: str) -> bool:
    """Say whether the last of these elements has a list of four whole numbers between two braces."""
    start, end = _tags([element])
    inside = text.rpartition(end)[0].rpartition(start)[2]
    # From the first brace to the last one.
    return _WHOLE_NUMBERS.search(inside.partition("{")[2].rpartition("}")[0]) is not None


def _shows_something(part: str) -> bool:
    """Say whether anything is visible outside of comments; one without an end reaches to the end."""
    shown, *commented = part.split("<!--")
    return has_visible_text(shown + "".join(each.partition("-->")[2] for each in commented))


def _tags(elements: Sequence[str]) -> list[str]:
    return [tag for element in elements for tag in (f"<{element}>", f"</{element}>")]


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern, regex.DOTALL)
