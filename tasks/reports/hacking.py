"""Whether a run hacks its reward, as far as its evaluations show: a finding, and its reasons in words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from grpo_core.errors import InputError
from grpo_core.rewards.hacking import MIN_DIFFERENCES, HackingRule
from tasks.reports.report import Notice
from tasks.reports.text import significant
from tasks.runs.run_view import RunView, signs_of

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Verdict:
    """What the measures that a run does not train on say.

    Attributes:
        finding: signs: the reward rose while a measure fell; none: no measure fell like that; unknown: too little was
            measured to tell.
        summary: the finding in a few words.
        reasons: a sentence for each sign, measure or missing measurement.
    """

    finding: Literal["signs", "none", "unknown"]
    summary: str
    reasons: tuple[str, ...]

    @property
    def signs(self) -> tuple[str, ...]:
        """The reasons where they are signs."""
        return self.reasons if self.finding == "signs" else ()


def hacking_notice(signs: Sequence[str]) -> Notice:
    """Return the signs that a verdict found, for the top of a report."""
    return Notice("signs of reward hacking", signs)


def hacking_verdict(run: RunView) -> Verdict:
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
    signs = signs_of(run, rule, measures)
    if signs:
        found = ", ".join(sign.guardrail for sign in signs)
        stopped = settings.get("on_fall") == "stop" and not run.finished
        note = ("the run was stopped for it (guardrails.on_fall)",) if stopped else ()
        return Verdict("signs", f"signs in {found}", (*map(str, signs), *note))
    return Verdict("none", f"no sign in {', '.join(measures)}", tuple(_trends(rewards, measures)))


def _unknown(reason: str) -> Verdict:
    return Verdict("unknown", "cannot be told", (reason,))


def _measured_only(run: RunView) -> dict[str, Points]:
    rewards = run.config.get("rewards")
    sections = [each for each in rewards if isinstance(each, Mapping)] if isinstance(rewards, list) else []
    measured = {str(each.get("name") or each.get("reward")) for each in sections if each.get("weight") == 0}
    return {label: points for label, points in run.heldout_scores.items() if label in measured}


def _trends(rewards: Mapping[float, float], measures: Mapping[str, Points]) -> Iterator[str]:
    for name, points in (("held-out reward", sorted(rewards.items())), *measures.items()):
        (first, before), (last, after) = points[0], points[-1]
        yield f"{name}: {significant(before)} with policy {first:g}, {significant(after)} with policy {last:g}"
