"""Whether a run learns as it should: the signs in its metrics, and whether its reward is hacked.

Every surface shows the same list, `RunHistory.signs`: the log, the reports, the pages, and `--json`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from grpo_core.errors import InputError
from grpo_core.rewards.hacking import MIN_DIFFERENCES, HackingRule, HackingSign, hacking_signs
from grpo_core.signs import HACKING, Sign, find_signs
from tasks.runs.run_view import RunHistory

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Verdict:
    """What the measures that a run does not train on say.

    Attributes:
        finding: signs: the reward rose while a measure fell; none: no measure fell like that; unknown: too little was
            measured to tell.
        summary: the finding in a few words.
        reasons: a sentence for each sign, measure or missing measurement.
        fallen: the measures that fell.
    """

    finding: Literal["signs", "none", "unknown"]
    summary: str
    reasons: tuple[str, ...]
    fallen: tuple[HackingSign, ...] = ()

    @property
    def signs(self) -> tuple[Sign, ...]:
        """The measures that fell, as signs."""
        advice = "look at the samples, and use an earlier policy or another reward"
        return tuple(Sign(HACKING, each.since, f"{each}: {advice}", each.guardrail) for each in self.fallen)


def signs_of(run: RunHistory) -> tuple[Sign, ...]:
    """Find every sign of a run: those of its metrics as they showed, then those of reward hacking."""
    return (*find_signs(run.iterations, run.stream), *hacking_verdict(run).signs)


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
    """Find the measures that fell while the held-out reward rose, as of the last evaluation.

    Args:
        measures: as for `guardrail_curves`.

    Raises:
        InputError: as `hacking_signs`.
    """
    return hacking_signs(*guardrail_curves(run, measures), rule)


def guardrail_curves(
    run: RunHistory, measures: Mapping[str, Points] | None = None
) -> tuple[list[int], list[float | None], dict[str, list[float | None]]]:
    """Return the evaluated versions, the held-out reward of each, and the level of each measure, None without one.

    Args:
        measures: (policy version, level) by label; None for the guardrails. Versions without any are left out.
    """
    levels = {label: dict(points) for label, points in (run.guardrail_series if measures is None else measures).items()}
    rewards = run.heldout_rewards
    versions = [each.version for each in run.evaluations if any(each.version in points for points in levels.values())]
    return (
        versions,
        [rewards.get(version) for version in versions],
        {label: [points.get(version) for version in versions] for label, points in levels.items()},
    )


def _unknown(reason: str) -> Verdict:
    return Verdict("unknown", "unknown", (reason,))


def _measured_only(run: RunHistory) -> dict[str, Points]:
    rewards: Any = run.config.get("rewards")
    sections = [each for each in rewards if isinstance(each, Mapping)] if isinstance(rewards, list) else []
    measured = {str(each.get("name") or each.get("reward")) for each in sections if each.get("weight") == 0}
    return {label: points for label, points in run.heldout_scores.items() if label in measured}


def _trends(rewards: Mapping[float, float], measures: Mapping[str, Points]) -> Iterator[str]:
    for name, points in (("held-out reward", sorted(rewards.items())), *measures.items()):
        (first, before), (last, after) = points[0], points[-1]
        yield f"{name}: {before:.4g} with policy {first:g}, {after:.4g} with policy {last:g}"
