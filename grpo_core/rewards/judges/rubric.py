"""What a judge is asked, and what its answer says."""

import json
import math
import string
from collections.abc import Mapping

from grpo_core.errors import InputError

ANSWER_FORM = (
    'Answer with one JSON object and nothing else: {{"score": n}}, where n is a number from {low:g} (worst) to '
    "{high:g} (best)."
)
REMINDER = "That was not in the form that was asked for. "

_DECODER = json.JSONDecoder()


def rubric_fields(place: str, rubric: object) -> tuple[str, ...]:
    """Names in braces that a rubric has filled in, in order; braces of its own are doubled.

    Raises:
        InputError: no text, or braces with something else than a plain name.
    """
    if not isinstance(rubric, str) or not rubric.strip():
        raise InputError(place, rubric, "Set the question that the judge is asked, as text.")
    hint = "Put plain names in braces, {prompt} or a column of the prompt file, and double all other braces."
    try:
        parsed = list(string.Formatter().parse(rubric))
    except ValueError as error:
        raise InputError(place, rubric, f"{hint} ({error})") from error
    fields = [part for part in parsed if part[1] is not None]
    # Attributes and indices would let a rubric reach into objects; formats and conversions have no use here.
    if any(not str(name).isidentifier() or form or conversion for _, name, form, conversion in fields):
        raise InputError(place, rubric, hint)
    return tuple(dict.fromkeys(str(name) for _, name, _, _ in fields))


def fill_rubric(rubric: str, values: Mapping[str, object], low: float, high: float) -> str:
    """The question with its names filled in and the form of the answer added."""
    filled = string.Formatter().vformat(rubric, (), values)
    return f"{filled}\n\n{ANSWER_FORM.format(low=low, high=high)}"


def read_score(answer: str) -> float | None:
    """The score that an answer holds; None where it holds none.

    Strictly, the answer is a JSON object with a finite number ``score``. Failing that, the last such object in it
    counts: after a line of reasoning, or inside a code fence, however many the judge quoted before. Never a bare
    number in running text, which may be any number of the image or the question.
    """
    score, place = None, answer.find("{")
    while place >= 0:
        try:
            found, end = _DECODER.raw_decode(answer, place)
        except RecursionError:
            # Nothing that a judge was asked for is nested that deep.
            return None
        except ValueError:
            found, end = {}, place + 1
        told = _score_of(found)
        score = score if told is None else told
        place = answer.find("{", place + 1 if told is None else end)
    return score


def _score_of(found: Mapping[str, object]) -> float | None:
    score = found.get("score")
    if not isinstance(score, int | float | str) or isinstance(score, bool):
        return None
    try:
        # Some models put the number in quotes.
        number = float(score)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
