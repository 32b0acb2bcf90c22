"""An evaluation repeated from its card: which scores are equal, how far the others are, and what explains it."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, ConfigDict

from tasks.reports.report import Cells, Notice, Report, Table
from tasks.reports.text import number
from tasks.verification.card import machine_in_words, package_facts
from tasks.verification.evaluation_card import CardScore, EvaluationCard
from tasks.verification.measured_evaluation import interval_over
from tasks.verification.records import Machine

RepeatLevel = Literal["equal", "rounding", "interval", "differs"]
"""Every score equal to the bit; within ROUNDING; the mean within the card's 95 % interval over prompts; neither."""

LEVELS: Mapping[RepeatLevel, str] = {
    "equal": "equal to the bit",
    "rounding": "within rounding",
    "interval": "within the 95 % interval",
    "differs": "differs",
}
ROUNDING = 1e-4
"""Largest distance of two scores, relative to the larger one or to 1, that counts as rounding."""

_SUM_ERROR = 1e-6


class RepeatedScore(BaseModel):
    """A held-out score of a card, and the same computed again.

    Attributes:
        stated, computed: means; None where no sample has the score.
        low, high: ends of the card's 95 % interval over prompts.
        equal: samples, of `samples`, whose scores are equal to the bit.
        largest: largest distance of two scores of a sample; None where only one of the two has a score.
        sample_id: the sample that is furthest, with its two scores; None where all are equal.
    """

    model_config = ConfigDict(frozen=True)

    title: str
    level: RepeatLevel
    stated: float | None
    computed: float | None
    low: float | None
    high: float | None
    equal: int
    samples: int
    largest: float | None
    sample_id: str | None = None
    sample_stated: float | None = None
    sample_computed: float | None = None


class RepeatedEvaluation(BaseModel):
    """What repeating the evaluation of a card gave.

    Attributes:
        folder: the exported folder; `run` and `version` are those that its card names.
        level: the lowest of the scores; `differs` also where there are problems.
        problems: what the card says that its own files and numbers contradict, as sentences.
        explanations: what is not as it was when the card was made, and may change how numbers are rounded.
        made_by, repeated_by: the machines of both evaluations.
    """

    model_config = ConfigDict(frozen=True)

    folder: str
    run: str
    version: int
    level: RepeatLevel
    scores: tuple[RepeatedScore, ...]
    problems: tuple[str, ...]
    explanations: tuple[str, ...]
    made_by: Machine
    repeated_by: Machine
    seconds: float

    @property
    def is_repeated(self) -> bool:
        """Whether the evaluation gave what the card says: equal, or within rounding or the interval."""
        return self.level != "differs"

    def report(self) -> Report:
        """Return each score as stated and as computed, what contradicts the card, and what explains differences."""
        explained = list(self.explanations) if self.level != "equal" else []
        return Report(
            f"{self.run}, version {self.version}, evaluated again: {LEVELS[self.level]}",
            facts=[
                ("made by", machine_in_words(self.made_by)),
                ("repeated by", machine_in_words(self.repeated_by)),
                *package_facts([self.made_by], self.repeated_by),
                ("seconds", f"{self.seconds:.1f}"),
            ],
            tables=[Table("", _rows(self.scores), texts=["level", "furthest sample"])],
            notices=[
                Notice("the card contradicts itself or its folder", self.problems),
                Notice("why numbers may be rounded otherwise", explained),
            ],
        )


def _rows(scores: Sequence[RepeatedScore]) -> list[Cells]:
    rows = [_row(each) for each in scores]
    if not any(row["furthest sample"] for row in rows):
        for row in rows:
            del row["furthest sample"]
    return rows


def _row(score: RepeatedScore) -> Cells:
    interval = "none" if score.low is None else f"{number(score.low)} to {number(score.high)}"
    furthest = ""
    if score.sample_id is not None:
        furthest = f"{score.sample_id}: stated {score.sample_stated}, computed {score.sample_computed}"
    return {
        "score": score.title,
        "stated": number(score.stated),
        "95 % interval": interval,
        "computed": number(score.computed),
        "equal samples": f"{score.equal:,} of {score.samples:,}",
        "level": LEVELS[score.level],
        "furthest sample": furthest,
    }


def compare_scores(
    card: EvaluationCard, computed: Sequence[CardScore], *, explanations: Sequence[str], unknown: bool
) -> tuple[RepeatedScore, ...]:
    """Compare each score of a card with the same score of the same samples, computed again.

    Args:
        computed: the scores of the repeated evaluation, with values in the order of the card's samples.
        explanations: what is known to round numbers otherwise; without any, only rounding is tolerated.
        unknown: whether the card does not say which processor computed. Where this one computes fewer than half of the
            scores to the bit, that explains it too.
    """
    again = {(each.label, each.role): each for each in computed}
    repeated = []
    for stated in card.scores:
        other = again[stated.label, stated.role]
        equal = sum(one == two for one, two in zip(stated.values, other.values, strict=True))
        tolerant = bool(explanations) or (unknown and 2 * equal < len(stated.values))
        repeated.append(_compare(card.samples, stated, other, equal, tolerant))
    return tuple(repeated)


def _compare(
    samples: Sequence[str], stated: CardScore, computed: CardScore, equal: int, tolerant: bool
) -> RepeatedScore:
    pairs = list(zip(samples, stated.values, computed.values, strict=True))
    apart = [(_distance(one, two), sample, one, two) for sample, one, two in pairs if one != two]
    furthest = max(apart, key=lambda each: each[0], default=(0.0, None, None, None))
    relative = max((each / max(1.0, abs(one or 0.0), abs(two or 0.0)) for each, _, one, two in apart), default=0.0)
    within = (
        stated.low is not None
        and stated.high is not None
        and computed.mean is not None
        and stated.low <= computed.mean <= stated.high
    )
    level: RepeatLevel = "differs"
    if not apart:
        level = "equal"
    elif relative <= ROUNDING:
        level = "rounding"
    elif tolerant and within:
        level = "interval"
    return RepeatedScore(
        title=stated.title,
        level=level,
        stated=stated.mean,
        computed=computed.mean,
        low=stated.low,
        high=stated.high,
        equal=equal,
        samples=len(pairs),
        largest=furthest[0] if math.isfinite(furthest[0]) else None,
        sample_id=furthest[1],
        sample_stated=furthest[2],
        sample_computed=furthest[3],
    )


def _distance(one: float | None, two: float | None) -> float:
    return math.inf if one is None or two is None else abs(one - two)


def lowest_level(scores: Sequence[RepeatedScore], problems: Sequence[str]) -> RepeatLevel:
    """Return the level of a repeated evaluation, given those of its scores."""
    order = list(LEVELS)
    return "differs" if problems else max((each.level for each in scores), key=order.index, default="equal")


def inconsistent_scores(card: EvaluationCard, groups: Sequence[str]) -> list[str]:
    """Name the means and intervals of a card that are not those of its own samples, as sentences.

    Args:
        groups: the prompt of each sample.
    """
    found = []
    for score in card.scores:
        known = [each for each in score.values if each is not None]
        mean = fmean(known) if known else None
        if not _same(score.mean, mean):
            found.append(f"{score.title}: the stated mean is {score.mean}, and that of its samples {mean}")
        low, high = interval_over(score.values, groups) or (None, None)
        if not (_same(score.low, low) and _same(score.high, high)):
            stated = f"the stated interval is {score.low} to {score.high}"
            found.append(f"{score.title}: {stated}, and that of its samples {low} to {high}")
    return found


def other_origins(card: EvaluationCard, computed: Sequence[CardScore]) -> list[str]:
    """Name the scores that come from another reward, version, settings or weights than the card says, as sentences."""
    again = {(each.label, each.role): each.provenance for each in computed}
    found = []
    for score in card.scores:
        stated, other = score.provenance, again[score.label, score.role]
        # Of prompts that a reward does not apply to there is none.
        if isinstance(stated, dict) and isinstance(other, dict) and stated != other:
            parts = ", ".join(name for name in stated if stated[name] != other.get(name))
            found.append(f"{score.title} is computed by another reward than the card says: its {parts} differ")
    return found


def _same(one: float | None, two: float | None) -> bool:
    if one is None or two is None:
        return one is two
    return math.isclose(one, two, rel_tol=_SUM_ERROR, abs_tol=_SUM_ERROR)
