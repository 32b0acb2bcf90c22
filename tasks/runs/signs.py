"""Signs that a training does not learn as it should, found in its metrics; docs/is_it_learning.md explains each.

A sign shows once, at the first iteration at which its condition holds. Conditions need several iterations in a row
where one iteration may be chance, and of two signs with one cause the cause shows alone.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from grpo_core.rollouts.streams import STREAMS, Stream
from grpo_core.update.settings import PARITY_SHARE, VELOCITY_NORM
from tasks.metrics import RANK_CORRELATION, RANK_CORRELATION_MIN

PAGE = "docs/is_it_learning.md"

HACKING = "reward-hacking"  # name of the signs that evaluations show; tasks.runs.hacking has their rule
ALL_ZERO_SIGN = "reward-zero"  # name of the signs that a single reward of a mix shows
FAR_KL = 1.0  # mean KL of a token to the reference, in nats, from which on the policy is far from it
NO_ENTROPY = 0.02  # entropy of a token, in nats, at or below which the policy samples the same again and again
NO_SPREAD = 0.9  # share of groups without spread from which on hardly anything is learned

HAD_SPREAD, ALIKE = 0.5, 0.3
"""A reward that has reached its bound had a spread in more than half of the groups in some iteration, has risen by half
of the samples' standard deviation then, and has less than this share of it left."""

ALL_ZERO = 0.8  # share of groups in which a reward is 0 for all samples, from which on it hardly counts in the mix
CLIPPED = 0.55  # share of actions clipped after an iteration's first step, from which on clipping determines the update
NEAR_GATE = 0.8  # share of its tolerance that the parity gate measures, from which on it is close to refusing an update

RANKED_ALIKE, RANKED_ALIKE_MEAN = 0.6, 0.75
"""Rank correlations of previews, of the lowest prompt and in the mean, from which on they choose nearly what the images
would. The lowest alone may be chance: of 8 seeds its standard error is .2."""

_PARITY_MEAN = "sampling/sampling_logp_difference/mean"
_IN_16_BITS = 5e-4  # a mean difference of tokens, in nats, that the gate lets through in 16 bits alone
KL_PENALTY = 0.05  # kl_coef x KL from which on it outweighs what advantages of unit variance can gain
INFLATED = 1.05  # norm of the velocity over the reference's, from which on training for a reward has inflated it
ROW = 3  # iterations in a row that a condition needs
RECENT = 5  # iterations over which the clipped share and the KL term are averaged
FALL = 5.0  # standard errors by which the reward must have fallen below a level that it had
WINDOW = 200  # iterations back to which the best level of the reward is looked for


@dataclass(frozen=True)
class Sign:
    """One line about what is wrong and what to do."""

    name: str  # the sign, and the anchor of its paragraph on PAGE
    iteration: int  # at which it showed first; for reward hacking the version of the evaluated policy
    message: str
    # What it is of where a run can have several of one name: a stream, a reward or a guardrail; else empty.
    subject: str = ""

    @property
    def anchor(self) -> str:
        """Where it is explained: a page of the documentation and the place on it."""
        return f"{PAGE}#{self.name}"

    def __str__(self) -> str:
        return f"iteration {self.iteration}: {self.message} ({self.anchor})"


class MeasuredIteration(Protocol):
    """An iteration with its metrics."""

    @property
    def iteration(self) -> int:
        """Return its number, from 1."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return its metrics by name."""


class _Measured(NamedTuple):
    """The metrics of one stream over the last iterations, newest last, and the place of its settings."""

    stream: Stream
    place: str
    rows: Sequence[Mapping[str, float]]

    def last(self, name: str, count: int = 1) -> list[float]:
        """Return the last values of a metric; fewer than `count` where an iteration does not have it, or is missing."""
        values: list[float] = []
        for row in reversed(self.rows[-count:]):
            if name not in row:
                break
            values.insert(0, row[name])
        return values

    def holds(self, name: str, condition: Callable[[float], bool], count: int = ROW) -> bool:
        """Return whether the condition holds in each of the last `count` iterations."""
        values = self.last(name, count)
        return len(values) == count and all(condition(value) for value in values)


def find_signs(iterations: Sequence[MeasuredIteration], stream: Stream) -> tuple[Sign, ...]:
    """Find the signs of a history in the order in which they showed; the metrics of `stream` have no prefix."""
    signs: list[Sign] = []
    for end in range(1, len(iterations) + 1):
        signs += new_signs(iterations[max(0, end - WINDOW) : end], stream, signs)
    return tuple(signs)


def new_signs(iterations: Sequence[MeasuredIteration], stream: Stream, known: Sequence[Sign] = ()) -> tuple[Sign, ...]:
    """Find the signs that show at the last of at least one iteration, and are not among the `known` ones."""
    last, shown = iterations[-1], {(sign.name, sign.subject) for sign in known}
    # A reward function may report a metric under any name.
    others = [each for each in STREAMS if each != stream and f"{each}/frac_reward_zero_std" in last.metrics]
    signs = []
    for each in (stream, *others):
        prefix = f"{each}/" if each != stream else ""
        rows = [_of_stream(row.metrics, prefix) for row in iterations[-WINDOW:]]
        measured = _Measured(each, f"update.{each}" if others else "update", rows)
        found = _found(measured)
        for name, message in found.items():
            if (name, each if others else "") not in shown:
                signs.append(Sign(name, last.iteration, message, each if others else ""))
        for label, message in _rewards_of_zero(measured).items():
            if {"groups-without-spread", "reward-at-bound", "entropy"}.isdisjoint(found):
                subject = f"{each}/{label}" if others else label
                if (ALL_ZERO_SIGN, subject) not in shown:
                    signs.append(Sign(ALL_ZERO_SIGN, last.iteration, message, subject))
    return tuple(signs)


def _of_stream(metrics: Mapping[str, float], prefix: str) -> Mapping[str, float]:
    if not prefix:
        return metrics
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def _found(measured: _Measured) -> dict[str, str]:
    """Return messages by the names of the signs that hold at the last iteration; without those that others explain."""
    found = {name: message for name, rule in _RULES.items() if (message := rule(measured)) is not None}
    for cause, effects in _EXPLAINS.items():
        if cause in found:
            found = {name: message for name, message in found.items() if name not in effects}
    return found


def _reward_at_bound(measured: _Measured) -> str | None:
    if not measured.holds("frac_reward_zero_std", lambda share: share >= NO_SPREAD):
        return None
    needed = ("reward", "reward_std", "frac_reward_zero_std")
    rows = [row for row in measured.rows if all(name in row for name in needed)]
    reward, std = measured.last("reward"), measured.last("reward_std")
    if not rows or not reward or not std:
        return None
    # A sparse reward has no spread in most groups at first.
    best = min(rows, key=lambda row: row["frac_reward_zero_std"])
    if best["frac_reward_zero_std"] >= HAD_SPREAD:
        return None
    if reward[0] - rows[0]["reward"] < best["reward_std"] / 2 or std[0] > ALIKE * best["reward_std"]:
        return None
    found = f"the reward is {reward[0]:.3g} and {_share(measured)} of the groups have no spread"
    return f"{found}, so nothing is left to learn: stop here, or take harder prompts"


def _entropy(measured: _Measured) -> str | None:
    if not measured.holds("entropy", lambda nats: nats <= NO_ENTROPY):
        return None
    found = f"the entropy is {measured.last('entropy')[0]:.2g} nats a token, so siblings are alike"
    return f"{found}: raise rollout.temperature or lower {_learning_rate(measured)}"


def _groups_without_spread(measured: _Measured) -> str | None:
    if not measured.holds("frac_reward_zero_std", lambda share: share >= NO_SPREAD):
        return None
    reward = "".join(f" (reward {value:.3g})" for value in measured.last("reward"))
    found = f"{_share(measured)} of the groups have no spread{reward}"
    least = min(row["frac_reward_zero_std"] for row in measured.rows if "frac_reward_zero_std" in row)
    if least < HAD_SPREAD:
        # The reward and the prompts are those that had a spread before.
        collapsed = f"{found}, and {least:.0%} had none before, so the policy has collapsed"
        return f"{collapsed}: start again from an earlier one, with a lower {_learning_rate(measured)}"
    return f"{found}, so nothing is learned: check the reward, how hard the prompts are, and rollout.group_size"


_ZEROS_OF_REWARD = re.compile(r"rewards/(.+)/frac_all_zero")


def _rewards_of_zero(measured: _Measured) -> dict[str, str]:
    """Return the message about each reward of a mix that is 0 nearly everywhere, by its label."""
    found = {}
    for name in measured.rows[-1]:
        label = _ZEROS_OF_REWARD.fullmatch(name)
        if label is None or not measured.holds(name, lambda share: share >= ALL_ZERO, RECENT):
            continue
        mean = f"rewards/{label[1]}/mean"
        penalty = any(row.get(mean, 0.0) < 0 for row in measured.rows)
        # A reward that was earned before is another matter, and 0 is the best value of a penalty.
        if not penalty and min(row[name] for row in measured.rows if name in row) >= HAD_SPREAD:
            found[label[1]] = (
                f"{label[1]} is 0 for all samples of {measured.last(name)[0]:.0%} of the prompts, so the other rewards "
                "alone are learned: look at its values (`grpo rewards analyse`); of a penalty this is normal"
            )
    return found


def _kl(measured: _Measured) -> str | None:
    # The KL of denoising steps is in other units.
    kl = measured.last("kl")
    if measured.stream != "tokens" or not kl or kl[0] < FAR_KL:
        return None
    found = f"the KL is {kl[0]:.2f} nats a token, far from the model"
    return f"{found}: lower {_learning_rate(measured)} or raise {measured.place}.kl_coef"


def _kl_penalty(measured: _Measured) -> str | None:
    terms = [row["loss"] - row["policy_loss"] for row in measured.rows[-RECENT:] if {"kl", "policy_loss"} <= {*row}]
    # Matched velocities have no other bound.
    if len(terms) < RECENT or math.fsum(terms) / RECENT < KL_PENALTY or _matches_velocities(measured):
        return None
    mean = math.fsum(terms) / RECENT
    return f"the KL term is {mean:.2g} of the loss and holds the policy back: lower {measured.place}.kl_coef"


def _no_pull(measured: _Measured) -> str | None:
    if not _matches_velocities(measured) or any("kl" in row for row in measured.rows[-ROW:]):
        return None
    return (
        f"nothing stops the policy, since velocities are matched without a pull: set {measured.place}.kl_coef above 0"
    )


def _velocity_norm(measured: _Measured) -> str | None:
    if not measured.holds(VELOCITY_NORM, lambda ratio: ratio >= INFLATED):
        return None
    found = f"the velocity's norm is {measured.last(VELOCITY_NORM)[0] - 1:.0%} above the reference's"
    return f"{found}, as where a reward is hacked: look at the images, and raise {measured.place}.kl_coef"


def _matches_velocities(measured: _Measured) -> bool:
    return any(len(measured.last(name, ROW)) == ROW for name in ("velocity/error", "nft/positive_error"))


def _clipped(measured: _Measured) -> str | None:
    shares = [
        # On the first step the ratios are 1, and nothing is clipped.
        row["clip_ratio/region_mean"] * row["optimizer_steps"] / (row["optimizer_steps"] - 1)
        for row in measured.rows[-RECENT:]
        if row.get("optimizer_steps", 0) > 1 and "clip_ratio/region_mean" in row
    ]
    if len(shares) < RECENT or math.fsum(shares) / RECENT < CLIPPED:
        return None
    noun = "tokens" if measured.stream == "tokens" else "steps"
    found = f"{math.fsum(shares) / RECENT:.0%} of the {noun} are clipped after the first optimizer step"
    return f"{found}: raise {measured.place}.clip_range, or lower {measured.place}.learning_rate or epochs"


def _near_gate(measured: _Measured) -> str | None:
    share, mean = measured.last(PARITY_SHARE), measured.last(_PARITY_MEAN)
    if not share or share[0] < NEAR_GATE:
        return None
    found = f"stored and recomputed log-probs differ by {share[0]:.0%} of what the gate allows"
    if measured.stream == "tokens" and mean and mean[0] > _IN_16_BITS:
        found += ", more than 16 bits usually round: compare the sampler's settings with the update's"
        return f"{found}, set policy.dtype to float32, or set {measured.place}.parity"
    return f"{found}: sample and train on the same kind of device, or set {measured.place}.parity"


def _previews(measured: _Measured) -> str | None:
    below = {RANK_CORRELATION_MIN: RANKED_ALIKE, RANK_CORRELATION: RANKED_ALIKE_MEAN}
    if not all(measured.holds(name, bound.__gt__) for name, bound in below.items()):
        return None
    lowest, mean = (f"{value:.2f}" for name in below for value in measured.last(name))
    found = f"previews rank the seeds of a prompt unlike the full images (correlation {mean}, lowest prompt {lowest})"
    return f"{found}: raise rollout.previews.steps, or have fewer or later noisy steps"


def _reward_fell(measured: _Measured) -> str | None:
    rows = [row for row in measured.rows if all(name in row for name in _REWARD)]
    if len(rows) <= ROW:
        return None
    now = _level(rows[-ROW:])
    # No level is above the highest reward, and no difference more certain than this one of its levels.
    if max(row["reward"] for row in rows) - now.mean <= FALL * now.error:
        return None
    earlier = [_level(rows[max(0, end - ROW) : end]) for end in range(1, len(rows) - ROW + 1)]
    best = max(earlier, key=lambda level: level.mean - FALL * math.hypot(level.error, now.error))
    if best.mean - now.mean <= FALL * math.hypot(best.error, now.error):
        return None
    found = f"the reward fell from {best.mean:.3g} to {now.mean:.3g}"
    return f"{found}: look at the samples, and lower {_learning_rate(measured)}"


_REWARD = ("reward", "reward_std", "groups_kept", "groups_dropped")


class _Level(NamedTuple):
    mean: float
    error: float


def _level(rows: Sequence[Mapping[str, float]]) -> _Level:
    """Return the mean reward of iterations and its standard error, as if siblings always had the same reward."""
    groups = math.fsum(row["groups_kept"] + row["groups_dropped"] for row in rows)
    variance = math.fsum(row["reward_std"] ** 2 for row in rows) / len(rows)
    return _Level(math.fsum(row["reward"] for row in rows) / len(rows), math.sqrt(variance / max(groups, 1.0)))


def _share(measured: _Measured) -> str:
    return f"{measured.last('frac_reward_zero_std')[0]:.0%}"


def _learning_rate(measured: _Measured) -> str:
    now = "".join(f"{value:g}" for value in measured.last("learning_rate")) or "unknown"
    return f"{measured.place}.learning_rate (now {now})"


_RULES: Mapping[str, Callable[[_Measured], str | None]] = {
    "reward-at-bound": _reward_at_bound,
    "entropy": _entropy,
    "groups-without-spread": _groups_without_spread,
    "kl": _kl,
    "kl-penalty": _kl_penalty,
    "no-pull": _no_pull,
    "velocity-norm": _velocity_norm,
    "clipped": _clipped,
    "parity": _near_gate,
    "previews": _previews,
    "reward-fell": _reward_fell,
}

_EXPLAINS: Mapping[str, Sequence[str]] = {
    "reward-at-bound": ("entropy", "groups-without-spread"),
    "entropy": ("groups-without-spread",),
    "reward-fell": ("entropy", "groups-without-spread"),
    "kl": ("kl-penalty", "clipped"),
}
"""What follows from a sign and says nothing further."""

SIGNS = (*_RULES, ALL_ZERO_SIGN, HACKING)  # the name of every sign
