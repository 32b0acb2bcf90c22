"""Signs of reward hacking: the reward rises while a measure that is not trained on falls.

A policy that learns to please its reward instead of doing better shows in measures that it is not trained on: a second
engine reads less of the text, the images of a group grow alike, edges or colours vanish (Gao, Schulman and Hilton,
2022, "Scaling Laws for Reward Model Overoptimization", arXiv:2210.10760, section 3, for the two curves that part).

The rule in one sentence: there is an earlier evaluation since which the reward has risen by a share of its value, the
guardrail has stood lower by a share of its own at each of the last few evaluations, and both changes are larger than
the noise between evaluations explains.

A fall is a sign, not a proof. A policy that starts from noise loses edges, colours and sharpness as it learns to draw;
guard such a run with measures that a good policy would raise, or keep.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from grpo_core.errors import InputError
from grpo_core.settings import check_fields

MIN_DIFFERENCES = 3
"""How many differences between evaluations an estimate of their noise needs."""


@dataclass(frozen=True)
class HackingRule:
    """When a guardrail's fall counts as a sign.

    With the defaults and a reward that truly rises, a guardrail that only fluctuates (independent, normal, by 6 to 30 %
    of its level) raised a false sign somewhere in at most 2 % of simulated runs of 5 to 40 evaluations. A fall to less
    than half, at once or over six evaluations, showed in 87 to 100 % of runs (at 2 to 15 % noise), 3 to 8 evaluations
    after it had begun.

    Attributes:
        rise: by which share of its level the reward must have risen.
        fall: by which share of its level the guardrail must have fallen, in (0, 1].
        patience: evaluations in a row, the last among them, at which the guardrail must stand that much lower. A level
            is the mean of so many evaluations, of fewer where a run begins.
        noise: how many times its standard error both changes must exceed. The standard error comes from the
            differences between successive evaluations, from :func:`noise_between`. 0 leaves the noise out of account;
            otherwise there is no sign before the fourth evaluation.
    """

    rise: PositiveFloat = 0.05
    fall: Annotated[float, Field(gt=0, le=1)] = 0.1
    patience: Annotated[int, Field(ge=1, le=1000)] = 3
    noise: NonNegativeFloat = 5.0

    def __post_init__(self) -> None:
        check_fields(self, "guardrails")


@dataclass(frozen=True)
class HackingSign:
    """A guardrail that fell while the reward rose.

    Attributes:
        guardrail: its name.
        first: its level before the fall: the highest since which the rule applies.
        last: its level over the last evaluations, as many as the rule's patience.
        change: ``(last - first) / abs(first)``, below 0; a level of 0 has no share to fall by, and raises no sign.
        reward_first: the reward's level over the same evaluations as `first`.
        reward_last: the same as `last`.
        since: policy version of the first evaluation in the unbroken row that stands lower by the rule's fall.
    """

    guardrail: str
    first: float
    last: float
    change: float
    reward_first: float
    reward_last: float
    since: int

    def __str__(self) -> str:
        return (
            f"{self.guardrail} fell from {self.first:.3g} to {self.last:.3g} ({self.change:+.0%}) and has been low "
            f"since policy {self.since}, while the reward rose from {self.reward_first:.3g} to {self.reward_last:.3g}"
        )


def hacking_signs(
    versions: Sequence[int],
    rewards: Sequence[float | None],
    guardrails: Mapping[str, Sequence[float | None]],
    rule: HackingRule,
) -> tuple[HackingSign, ...]:
    """Find the guardrails that fell while the reward rose, as of the last evaluation, in the mapping's order.

    An evaluation without a finite reward or without a finite guardrail does not count for that guardrail; it ends no
    row either.

    Args:
        versions: policy version of each evaluation, rising.
        rewards: mean reward of each evaluation, on the same samples as the guardrails.
        guardrails: mean of each guardrail at each evaluation; higher is better.
        rule: what counts.

    Raises:
        InputError: versions that do not rise, or other numbers of evaluations.
    """
    if any(later <= earlier for earlier, later in itertools.pairwise(versions)):
        raise InputError("versions", list(versions), "Give each evaluated policy once, in order.")
    _check_length("rewards", rewards, versions)
    signs = []
    for name, levels in guardrails.items():
        _check_length(f"guardrails.{name}", levels, versions)
        rows = [
            (version, reward, level)
            for version, reward, level in zip(versions, rewards, levels, strict=True)
            if reward is not None and level is not None and math.isfinite(reward) and math.isfinite(level)
        ]
        sign = _find_sign(name, [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], rule)
        signs += [] if sign is None else [sign]
    return tuple(signs)


def noise_between(values: Sequence[float]) -> float | None:
    """Estimate the standard deviation of one evaluation from successive differences; None from too few.

    Half the mean square difference (von Neumann, Kent, Bellinson and Hart, 1941, "The Mean Square Successive
    Difference") is the variance whether the values drift or not. The largest difference is left out, for it may be the
    very fall that is looked for; as the largest of n squared normal values is about 2 ln n times their mean, the others
    are divided by n - 2 ln n, and by n / 2 at least. A slope counts as noise, so the estimate is rather too high.
    """
    squares = sorted((later - earlier) ** 2 for earlier, later in itertools.pairwise(values))
    count = len(squares)
    if count < MIN_DIFFERENCES:
        return None
    return math.sqrt(math.fsum(squares[:-1]) / 2.0 / max(count - 2.0 * math.log(count), count / 2.0))


def _find_sign(
    name: str, versions: Sequence[int], rewards: Sequence[float], levels: Sequence[float], rule: HackingRule
) -> HackingSign | None:
    recent = slice(len(levels) - rule.patience, len(levels))
    if recent.start < 1:
        return None
    last, reward_last = statistics.fmean(levels[recent]), statistics.fmean(rewards[recent])
    level_noise, reward_noise = _noise(levels, rule), _noise(rewards, rule)
    found: HackingSign | None = None
    for end in range(1, recent.start + 1):
        window = slice(max(0, end - rule.patience), end)
        first, reward_first = statistics.fmean(levels[window]), statistics.fmean(rewards[window])
        low = [first - level >= rule.fall * abs(first) for level in levels]
        # Of the difference between two means of independent values.
        scale = math.sqrt(1.0 / (window.stop - window.start) + 1.0 / rule.patience)
        fell = first != 0.0 and all(low[recent]) and first - last > level_noise * scale
        rise = reward_last - reward_first
        rose = rise >= rule.rise * abs(reward_first) and rise > reward_noise * scale
        if fell and rose and (found is None or first > found.first):
            since = max((row + 1 for row in range(end, len(low)) if not low[row]), default=end)
            change = (last - first) / abs(first)
            found = HackingSign(name, first, last, change, reward_first, reward_last, versions[since])
    return found


def _noise(values: Sequence[float], rule: HackingRule) -> float:
    """Return the noise of one evaluation times the rule's factor; infinite where it cannot be estimated."""
    if rule.noise == 0:
        return 0.0
    noise = noise_between(values)
    return math.inf if noise is None else rule.noise * noise


def _check_length(place: str, values: Sequence[object], versions: Sequence[int]) -> None:
    if len(values) != len(versions):
        hint = f"There are {len(versions)} evaluations; give one for each, None where it is missing."
        raise InputError(place, f"{len(values)} values", hint)
