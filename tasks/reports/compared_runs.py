"""What runs have in common and what not, and paired differences of their held-out scores with intervals.

Samples of one prompt resemble one another, so they count as one observation: the mean of their differences. An interval
over single samples would be far too narrow. Student's t over these means is used and not the bootstrap, since held-out
sets are small: in simulations of 12 prompts with 4 samples each, its 95 % intervals covered the true difference in 95 %
of cases (BCa bootstrap: 91 %, t over samples: 70 %), and with exponentially skewed differences in 90 % (87 and 68 %).
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from configs.scoring import reward_label
from grpo_core.errors import InputError
from tasks.metrics import split_stream
from tasks.reports.curves import Curve
from tasks.reports.text import PLOTTED, REPORTED_OF_TEXTS, metric_title, with_streams
from tasks.runs.layout import REWARDS, SCORES_FILE
from tasks.runs.lookup import read_description
from tasks.runs.reader import RunReader
from tasks.runs.run_view import RunView, rescoring_of
from tasks.storage.artifacts.reference import ArtifactRef

CONFIDENCE = 0.95

Scores = Mapping[str, Mapping[int, float]]  # scores of samples by prompt id, then by sampling seed


class PairedDifference(BaseModel):
    """How a score of a run differs from that of the first run, on the prompts that both have."""

    model_config = ConfigDict(frozen=True)

    run: str  # label of the run
    score: str  # name of the score in the first run
    prompts: int  # number of prompts that have a score in both runs; they are the unit of the confidence interval
    samples: int  # samples that were compared, in each run, or in both together where seeds differ
    same_seeds: bool  # whether all held-out samples of the prompts of both runs have the same seeds
    first: float  # mean over prompts of a prompt's mean score in the first run, and in this one
    second: float
    difference: float  # second minus first
    low: float | None  # ends of the 95 % confidence interval of the difference; None with fewer than two prompts
    high: float | None
    higher: int  # prompts whose mean score is higher, or lower, in this run
    lower: int
    by_prompt: Mapping[str, float] = Field(exclude=True)  # difference by prompt id; left out of JSON


def paired_difference(
    first: Scores, second: Scores, *, run: str, score: str, same_seeds: bool
) -> PairedDifference | None:
    """Compare two runs on the prompts that both have, by samples of equal seeds where there are any; or None."""
    means: dict[str, tuple[float, float]] = {}
    samples = 0
    for prompt in first:
        sides = first[prompt], second.get(prompt, {})
        seeds = [seed for seed in sides[0] if seed in sides[1]]
        chosen = [[side[seed] for seed in seeds] if seeds else list(side.values()) for side in sides]
        if all(chosen):
            means[prompt] = fmean(chosen[0]), fmean(chosen[1])
            samples += len(seeds) or sum(map(len, chosen))
    if not means:
        return None
    by_prompt = {prompt: after - before for prompt, (before, after) in means.items()}
    differences = list(by_prompt.values())
    low, high = interval(differences) or (None, None)
    return PairedDifference(
        run=run,
        score=score,
        prompts=len(by_prompt),
        samples=samples,
        same_seeds=same_seeds,
        first=fmean([before for before, _ in means.values()]),
        second=fmean([after for _, after in means.values()]),
        difference=fmean(differences),
        low=low,
        high=high,
        higher=sum(each > 0 for each in differences),
        lower=sum(each < 0 for each in differences),
        by_prompt=by_prompt,
    )


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's t confidence interval of the mean of independent values; None with fewer than two."""
    count = len(values)
    if count < 2:
        return None
    # SciPy takes half a second to import.
    from scipy.special import stdtrit

    mean = fmean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2)) * math.sqrt(variance / count)
    return mean - half, mean + half


Points = list[tuple[float, float]]

_CURVES = tuple(name for name in PLOTTED if not name.startswith("sampling/"))

_UNCOMPARED = ("run.name", "storage.root")
_REWARD_OF_ADVANTAGES = ("missing", "kl_coef", "kl_estimator")


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """A run among those that are compared."""

    label: str  # its name, or its path where another run has the same name
    reader: RunReader
    view: RunView
    described: Mapping[str, Any]  # content of run.json; empty where it is missing or damaged
    # Where each reward's scores come from, by label, as of the last scored iteration.
    provenances: Mapping[str, str | None]

    @property
    def mix(self) -> str | None:
        """What determines the combined reward of a sample, as JSON; None where run.json does not say it."""
        return reward_mix(self.described)

    @property
    def evaluated_on(self) -> object:
        """What run.json says of its held-out prompts and seeds; None where it says nothing."""
        return self.described.get("evaluation")

    @property
    def trained_on(self) -> str | None:
        """The rescoring that a replay was trained on, in words; None where the run's own rewards were."""
        return rescoring_in_words(self.view.config)


def reward_mix(described: Mapping[str, Any]) -> str | None:
    """Return what determines the combined reward of a sample, by run.json, as JSON; None where it is not known."""
    identity = described.get("identity") or {}
    settings = identity.get("settings") or {}
    if not {"advantages", "rewards"} <= settings.keys():
        return None
    combined = {name: settings["advantages"].get(name) for name in _REWARD_OF_ADVANTAGES}
    return json.dumps([settings["rewards"], sorted(identity.get("scores") or ()), combined], sort_keys=True)


def rescoring_in_words(config: Mapping[str, Any]) -> str | None:
    """Return the rescoring that a replay was trained on, by its config.yaml, and its run; None of any other run."""
    replay = config.get("replay")
    name = rescoring_of(replay)
    return f"rescoring {name} of {replay.get('source')}" if name and isinstance(replay, Mapping) else None


def describe_run(label: str, reader: RunReader, view: RunView, fetched: Path) -> ComparedRun:
    """Gather a run's description; remote files are copied below the folder `fetched`."""
    try:
        described = read_description(reader.store)
    except InputError as error:
        described = {}
        reader.report_damage("run.json", error.hint)
    # A replay scores nothing but its evaluations.
    scored = [each.stages[REWARDS] for each in (view.shown, *view.evaluated[-1:]) if each and REWARDS in each.stages]
    origins = provenances(reader, scored[0], fetched) if scored else {}
    return ComparedRun(label, reader, view, described, origins)


def provenances(reader: RunReader, parts: Sequence[ArtifactRef], fetched: Path) -> dict[str, str | None]:
    """Return where the scores of these tables come from, by label; None where a table has several origins or none."""
    found: dict[str, set[str]] = {}
    for part in parts:
        table = pq.read_table(reader.local_folder(part, fetched) / SCORES_FILE, columns=["provenance"])
        known = {each for each in table["provenance"].to_pylist() if each is not None}
        found.setdefault(part.folder.rsplit("/", 1)[-1], set()).update(known)
    return {label: known.pop() if len(known) == 1 else None for label, known in found.items()}


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, tuple[str | None, ...]]:
    """Return the runs' values, None where unset, of each setting and of what made them that differs, by path."""
    settings = [
        dict(flat_settings({**run.view.config, **inputs_of(run.view.config, run.described), **_made_with(run)}))
        for run in runs
    ]
    values = {path: [each.get(path) for each in settings] for path in itertools.chain(*settings)}
    return {
        path: tuple(None if value is None else written_setting(value) for value in found)
        for path, found in values.items()
        if path not in _UNCOMPARED and any(value != found[0] for value in found)
    }


def inputs_of(config: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration only names: digests of model and prompts, versions of rewards, by run.json."""
    identity = described.get("identity") or {}
    digests = {"policy.model": described.get("model_digest"), "data.prompts": identity.get("prompts")}
    rewards = config.get("rewards")
    sections = [each for each in rewards if isinstance(each, Mapping)] if isinstance(rewards, list) else []
    scores = {}
    for section, (provenance, _) in zip(sections, identity.get("scores") or (), strict=False):
        # The version of a function has the digest of its code.
        origin = json.loads(provenance)
        scores[reward_label(section)] = {name: origin.get(name) for name in ("version", "weights")}
    return {"sha256": {name: str(digest)[:12] for name, digest in digests.items() if digest}, "scores": scores}


def _made_with(run: ComparedRun) -> dict[str, Any]:
    code = (run.described.get("identity") or {}).get("code", {})
    return {
        "code": {name: str(digest)[:12] for name, digest in code.items()},
        "versions": run.described.get("versions", {}),
        "started": {"host": run.view.starts[-1].host, "code": run.view.starts[-1].code} if run.view.starts else {},
    }


def flat_settings(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path of each value, and the value; null is the same as what is missing."""
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        # Rewards, data sets and the like go by their name and not by their place.
        labels = [reward_label(each) if "reward" in each else str(each.get("name") or "") for each in value]
        named = all(labels) and len(set(labels)) == len(labels)
        value = dict(zip(labels if named else map(str, range(len(value))), value, strict=True))
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from flat_settings(each, f"{path}.{key}" if path else str(key))
    elif value is not None:
        yield path, value


def written_setting(value: object) -> str:
    """Write the value of a setting for a table."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def compared_curves(runs: Sequence[ComparedRun]) -> tuple[list[Curve], list[str]]:
    """Return the curves of what means the same in the first run and in others, and what is left out and why."""
    # Versions of one run have the same curves.
    runs = list({run.reader.store.path(): run for run in reversed(runs)}.values())[::-1]
    first, *others = runs
    noun, omissions = first.view.noun, []
    same_mix, same_prompts = [first], [first]
    for run in others:
        if run.mix is not None and run.mix == first.mix:
            same_mix.append(run)
        else:
            why = "is another mix than that of" if run.mix and first.mix else "may be another mix than that of"
            omissions.append(f"{run.label}: its combined reward {why} {first.label}, so it is not compared")
        if run.evaluated_on is not None and run.evaluated_on == first.evaluated_on:
            same_prompts.append(run)
        else:
            omissions.append(f"{run.label}: other held-out prompts or seeds than {first.label}, so no held-out curves")
    held = [run for run in same_mix if run in same_prompts]
    trained = [run for run in same_mix if run.trained_on == first.trained_on]
    for run in others:
        if run in same_mix and run not in trained:
            why = f"trained on {run.trained_on or 'its own rewards'}, {first.label} on {first.trained_on or 'its own'}"
            omissions.append(f"{run.label}: {why}, so its training reward is not compared")
    curves = [
        Curve("Reward", metric_title("reward", noun)[1], _of(runs, trained, "reward")),
        Curve("Held-out reward", metric_title("heldout_reward", noun)[1], _heldout(runs, held)),
    ]
    for label, origin in first.provenances.items():
        same = [run for run in runs if origin is not None and run.provenances.get(label) == origin]
        for run in others:
            if label in run.provenances and run not in same:
                why = "other settings, another version or other weights than in"
                omissions.append(f"{run.label}: {label} has {why} {first.label}, so it is not compared")
        name, common = f"rewards/{label}/mean", [run for run in same if run in same_prompts]
        curves.append(Curve(*metric_title(name, noun), _of(runs, same, name)))
        meaning = "over the held-out samples, before its weight"
        curves.append(Curve(f"{label}, held-out: mean", meaning, _heldout(runs, common, label)))
    lengths = REPORTED_OF_TEXTS if noun == "completion" else ()
    measured = {name for view in first.view.iterations for name in view.metrics}
    for name in with_streams(("reward", *_CURVES, *lengths), measured)[1:]:
        shown = trained if split_stream(name)[1] == "reward" else runs
        curves.append(Curve(*metric_title(name, noun, first.view.stream), _of(runs, shown, name)))
    # A single reward of weight 1 is the combined reward.
    distinct = {_digest(each): each for each in reversed(curves)}
    return [each for each in reversed(distinct.values()) if sum(map(bool, each.series.values())) > 1], omissions


def _digest(curve: Curve) -> str:
    """Return the points without the digits that depend on the order of a sum."""
    return json.dumps([[(x, round(y, 9)) for x, y in points] for points in curve.series.values()])


def _of(runs: Sequence[ComparedRun], shown: Sequence[ComparedRun], metric: str) -> dict[str, Points]:
    """Return the metric's points by run; every run has its place, so that it keeps its colour."""
    return {run.label: run.view.series(metric) if run in shown else [] for run in runs}


def _heldout(runs: Sequence[ComparedRun], shown: Sequence[ComparedRun], label: str | None = None) -> dict[str, Points]:
    """Return the points of the combined held-out reward, or of the reward of this label, by run."""
    return {
        run.label: (run.view.heldout_series() if label is None else run.view.heldout_scores.get(label, []))
        if run in shown
        else []
        for run in runs
    }
