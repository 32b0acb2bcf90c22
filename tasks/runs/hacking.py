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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from grpo_core.errors import InputError
from grpo_core.rewards.registry import HackingRule
from tasks.runs.run_view import RunHistory
from tasks.runs.signs import HACKING, Sign

MIN_DIFFERENCES = 3  # how many differences between evaluations an estimate of their noise needs


Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class HackingSign:
    """A guardrail that fell while the reward rose."""

    guardrail: str  # its name
    first: float  # its level before the fall: the highest since which the rule applies
    last: float  # its level over the last evaluations, as many as the rule's patience
    change: float  # ``(last - first) / abs(first)``, below 0; a level of 0 has no share to fall by, and raises no sign
    reward_first: float  # the reward's level over the same evaluations
    reward_last: float
    since: int  # policy version of the first evaluation in the unbroken row that stands lower by the rule's fall

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

    Versions rise; rewards and guardrails, of which higher is better, are means over the same samples at each. An
    evaluation without a finite reward or guardrail does not count for that guardrail; it ends no row either.
    """
    signs = []
    for name, levels in guardrails.items():
        rows = [
            (version, reward, level)
            for version, reward, level in zip(versions, rewards, levels, strict=True)
            if reward is not None and level is not None and math.isfinite(reward) and math.isfinite(level)
        ]
        if (sign := _find_sign(name, rows, rule)) is not None:
            signs.append(sign)
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


def _find_sign(name: str, rows: Sequence[tuple[int, float, float]], rule: HackingRule) -> HackingSign | None:
    recent = slice(len(rows) - rule.patience, len(rows))
    if recent.start < 1:
        return None
    versions, rewards, levels = zip(*rows, strict=True)
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


@dataclass(frozen=True)
class Verdict:
    """What measures that a run does not train on say: the finding, in a few words, with a sentence for each reason."""

    finding: Literal["signs", "none", "unknown"]
    summary: str
    reasons: tuple[str, ...]
    fallen: tuple[HackingSign, ...] = ()

    @property
    def signs(self) -> tuple[Sign, ...]:
        """The measures that fell, as signs."""
        advice = "look at the samples, and use an earlier policy or another reward"
        return tuple(Sign(HACKING, each.since, f"{each}: {advice}", each.guardrail) for each in self.fallen)


def hacking_verdict(run: RunHistory) -> Verdict:
    """Apply the run's own rule to its guardrails and to the rewards of weight 0, which are measured only."""
    section = run.config.get("guardrails")
    settings = section if isinstance(section, Mapping) else {}
    try:
        rule = HackingRule(**{each.name: settings[each.name] for each in fields(HackingRule) if each.name in settings})
    except InputError as error:
        return _unknown(f"the rule in config.yaml is not valid: {error}")
    rewards = dict(run.heldout_series())
    if not rewards:
        return _unknown("no policy was evaluated on held-out prompts; set evaluate.prompts")
    measures = {**run.guardrail_series, **_measured_only(run)}
    if not measures:
        hint = "set guardrails.rewards, or give a reward the weight 0"
        return _unknown(f"every held-out measure is trained on; {hint}")
    needed = max(rule.patience, MIN_DIFFERENCES if rule.noise else 0) + 1
    if len(rewards) < needed:
        return _unknown(f"{len(rewards)} of the {needed} evaluations that a sign needs; set evaluate.every")
    fallen = fallen_measures(run, rule, measures)
    if fallen:
        found = ", ".join(sign.guardrail for sign in fallen)
        stopped = settings.get("on_fall") == "stop" and not run.finished
        note = ("the run was stopped for it (guardrails.on_fall)",) if stopped else ()
        return Verdict("signs", f"signs in {found}", (*map(str, fallen), *note), fallen)
    named = (f"the guardrail {label}" if label in run.guardrail_series else f"{label} (weight 0)" for label in measures)
    return Verdict("none", f"no sign in {', '.join(named)}", tuple(_trends(rewards, measures)))


def fallen_measures(
    run: RunHistory, rule: HackingRule, measures: Mapping[str, Points] | None = None
) -> tuple[HackingSign, ...]:
    """Find the measures, by default guardrails, that fell while the held-out reward rose as of the last evaluation."""
    levels = {label: dict(points) for label, points in (run.guardrail_series if measures is None else measures).items()}
    versions = [each.version for each in run.evaluations if any(each.version in points for points in levels.values())]
    rewards = run.heldout_rewards
    return hacking_signs(
        versions,
        [rewards.get(version) for version in versions],
        {label: [points.get(version) for version in versions] for label, points in levels.items()},
        rule,
    )


def _unknown(reason: str) -> Verdict:
    return Verdict("unknown", "not measured", (reason,))


def _measured_only(run: RunHistory) -> dict[str, Points]:
    rewards: Any = run.config.get("rewards")
    sections = [each for each in rewards if isinstance(each, Mapping)] if isinstance(rewards, list) else []
    measured = {str(each.get("name") or each.get("reward")) for each in sections if each.get("weight") == 0}
    return {label: points for label, points in run.heldout_scores.items() if label in measured}


def _trends(rewards: Mapping[float, float], measures: Mapping[str, Points]) -> Iterator[str]:
    for name, points in (("held-out reward", sorted(rewards.items())), *measures.items()):
        (first, before), (last, after) = points[0], points[-1]
        yield f"{name}: {before:.4g} with policy {first:g}, {after:.4g} with policy {last:g}"
