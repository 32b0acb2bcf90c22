"""At which level a repeated evaluation agrees with its card, by values that can be worked out by hand."""

from collections.abc import Sequence

import pytest

from tasks.verification.evaluation_card import CardScore, CardSettings, EvaluationCard
from tasks.verification.records import Machine
from tasks.verification.repeated import RepeatedScore, compare_scores, inconsistent_scores, lowest_level, other_origins

SAMPLES = ("a.s00", "a.s01", "b.s00", "b.s01")
GROUPS = ("a", "a", "b", "b")
VALUES = (0.0, 0.5, 0.5, 1.0)


def score(values: Sequence[float | None], mean: float | None, **changes: object) -> CardScore:
    """A score whose prompts have the means 0.25 and 0.75: the interval is 0.5 +- 12.706 * 0.25."""
    half = 12.706204736 * 0.25
    stated = {"label": "r", "role": "reward", "mean": mean, "low": 0.5 - half, "high": 0.5 + half, "values": values}
    return CardScore.model_validate({**stated, **changes})


def card(*scores: CardScore) -> EvaluationCard:
    settings = CardSettings(
        policy={},
        rollout={},
        rewards=[],
        guardrails={},
        advantages={},
        seed=0,
        samples_per_prompt=2,
        torch_threads=1,
    )
    return EvaluationCard(
        run="run",
        version=1,
        policy_digest="a" * 64,
        weights={},
        merged=False,
        base_digest=None,
        settings=settings,
        machine=Machine(code=None, processor=None, versions={}),
        fingerprints={},
        datasets=(),
        prompts=(),
        samples=SAMPLES,
        scores=scores,
    )


def compared(
    values: Sequence[float | None], mean: float | None, *, explanations: Sequence[str] = (), unknown: bool = False
) -> RepeatedScore:
    stated, again = card(score(VALUES, 0.5)), score(values, mean)
    (found,) = compare_scores(stated, [again], explanations=explanations, unknown=unknown)
    return found


OTHER = (0.1, 0.6, 0.6, 1.1)


@pytest.mark.parametrize(
    ("values", "mean", "options", "level", "equal"),
    [
        (VALUES, 0.5, {}, "equal", 4),
        ((0.0, 0.5, 0.5, 1.0 + 2e-16 * 2), 0.5, {}, "rounding", 3),
        ((0.0, 0.5 + 9e-5, 0.5, 1.0), 0.5, {}, "rounding", 3),
        ((0.0, 0.5 + 2e-4, 0.5, 1.0), 0.5, {}, "differs", 3),
        (OTHER, 0.6, {}, "differs", 0),
        (OTHER, 0.6, {"explanations": ("another processor",)}, "interval", 0),
        (OTHER, 0.6, {"unknown": True}, "interval", 0),
        # A processor that computes most samples to the bit does not explain the others.
        ((0.0, 0.5, 0.5, 0.9), 0.475, {"unknown": True}, "differs", 3),
        (OTHER, 4.0, {"explanations": ("another processor",)}, "differs", 0),
        ((None, 0.5, 0.5, 1.0), 2 / 3, {}, "differs", 3),
    ],
)
def test_the_level_of_a_score(
    values: Sequence[float | None], mean: float, options: dict[str, object], level: str, equal: int
) -> None:
    found = compared(values, mean, **options)  # type: ignore[arg-type]
    assert (found.level, found.equal) == (level, equal)


def test_the_furthest_sample_is_named_with_both_scores() -> None:
    found = compared((0.0, 0.4, 0.8, 1.0), 0.55)
    assert (found.sample_id, found.sample_stated, found.sample_computed) == ("b.s00", 0.5, 0.8)
    assert found.largest == pytest.approx(0.3)
    # One that has no score on one side is further than any distance.
    found = compared((0.0, None, 0.8, 1.0), 0.6)
    assert (found.sample_id, found.largest) == ("a.s01", None)


def test_means_and_intervals_that_are_not_those_of_the_samples_are_named() -> None:
    assert inconsistent_scores(card(score(VALUES, 0.5)), GROUPS) == []
    (mean,) = inconsistent_scores(card(score(VALUES, 0.6)), GROUPS)
    assert mean.startswith("r: the stated mean is 0.6")
    (interval,) = inconsistent_scores(card(score(VALUES, 0.5, low=0.4, high=0.6)), GROUPS)
    assert interval.startswith("r: the stated interval is 0.4 to 0.6")


def test_scores_of_another_reward_are_named() -> None:
    stated = score(VALUES, 0.5, provenance={"reward": "r", "version": "1", "weights": {"f": "a"}})
    other = score(VALUES, 0.5, provenance={"reward": "r", "version": "2", "weights": {"f": "b"}})
    assert other_origins(card(stated), [stated]) == []
    assert other_origins(card(stated), [other]) == [
        "r is computed by another reward than the card says: its version, weights differ"
    ]


def test_the_lowest_level_of_the_scores_counts_and_a_problem_is_a_difference() -> None:
    scores = [compared(VALUES, 0.5), compared(OTHER, 0.6, unknown=True)]
    assert lowest_level(scores, ()) == "interval"
    assert lowest_level(scores[:1], ["the weights are others"]) == "differs"
