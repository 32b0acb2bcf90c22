"""A run as it lies on disk -> frozen records, whether it is finished, stopped half-way, or still running."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tasks.metrics.names import RUNNING
from tasks.metrics.pooled import pool_rounds
from tasks.reports.run_records import STAGES, EvaluationView, IterationView, RunView, SetAside, Stages
from tasks.runs.iterations import iteration_numbers
from tasks.storage.artifacts.reader import ArtifactReader, StoredArtifact
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.run_description import CONFIG_FILE, CONFIG_SHA256, RUN_FILE, load_description
from tasks.storage.artifacts.store import SET_ASIDE

_DRAW = re.compile(r"round_(\d{2,})")
_VERSION = re.compile(r"(\d{6,})\.manifest\.json")
_STATE_FILE = "training_state.json"


def read_run(reader: ArtifactReader, shown: int | None = None) -> RunView:
    """Read a run; what is shown is verified whole, the rest as far as a second or so of reading allows.

    Args:
        reader: at the run.
        shown: the iteration to show; by default the last one whose samples have rewards.
    """
    iterations = {number: _find_rounds(reader, f"iteration_{number:06d}") for number in iteration_numbers(reader)}
    versions = _versions(reader, "policies")
    policies = {version: found for version in versions if (found := reader.find(f"policies/{version:06d}"))}
    for version, found in policies.items():
        if version > 0:
            iterations.setdefault(version, {})["update"] = {(1, ""): found}
    evaluated = sorted({int(name) for name in reader.names("evaluations") if name.isdigit()})
    evaluations = {version: _find_rounds(reader, f"evaluations/{version:06d}") for version in evaluated}
    chosen = _default(iterations) if shown is None else shown
    scored = [version for version, stages in evaluations.items() if "advantages" in stages]
    _keep_whole(reader, [iterations.get(chosen or 0, {})], always=True)
    _keep_whole(reader, [evaluations[version] for version in dict.fromkeys([*scored[:1], *scored[-1:]])], always=True)
    _keep_whole(reader, [*iterations.values(), *evaluations.values()], always=False)
    described = _read_description(reader)
    version, digest = _last_policy(reader, policies, iterations, described)
    heldout = tuple(
        EvaluationView(number, _references(stages), _guardrails(reader, f"evaluations/{number:06d}/guardrails"))
        for number, stages in evaluations.items()
    )
    rewards = {view.version: view.reward for view in heldout}
    views = tuple(
        _iteration_view(reader, number, stages, rewards.get(number))
        for number, stages in sorted(iterations.items())
        if stages
    )
    config_text, config = _read_config(reader, (described or {}).get(CONFIG_SHA256))
    return RunView(
        name=reader.store.run,
        folder=reader.store.path(),
        config_text=config_text,
        config=config,
        iterations=views,
        shown=next((view for view in views if view.iteration == chosen), None),
        evaluations=heldout,
        policy_version=version,
        policy_digest=digest,
        set_aside=_read_set_aside(reader),
        damages=tuple(reader.damages),
        unverified=reader.unverified,
    )


Found = dict[str, dict[tuple[int, str], StoredArtifact]]
"""By stage, by draw from 1, and by label where it is a reward; of the advantages the last draw's, which cover all."""


def _find_rounds(reader: ArtifactReader, place: str) -> Found:
    """The first draw's stages lie in the place itself, those of later ones in folders of it."""
    names = reader.names(place)
    later = {int(match[1]): f"{place}/{name}" for name in names if (match := _DRAW.fullmatch(name))}
    folders = {1: place, **later}
    stages: Found = {}
    for draw, folder in sorted(folders.items()):
        if found := reader.find(f"{folder}/rollouts"):
            stages.setdefault("rollouts", {})[draw, ""] = found
        for label in reader.artifact_names(f"{folder}/rewards"):
            if found := reader.find(f"{folder}/rewards/{label}"):
                stages.setdefault("rewards", {})[draw, label] = found
    for draw, folder in sorted(folders.items(), reverse=True):
        if "advantages.manifest.json" in (names if draw == 1 else reader.names(folder)):
            if found := reader.find(f"{folder}/advantages"):
                stages["advantages"] = {(draw, ""): found}
            break
    return stages


def _guardrails(reader: ArtifactReader, folder: str) -> dict[str, float]:
    means = {}
    for label in reader.artifact_names(folder):
        found = reader.find(f"{folder}/{label}")
        if found is not None and f"rewards/{label}/mean" in found.reference.metrics:
            means[label] = found.reference.metrics[f"rewards/{label}/mean"]
    return means


def _versions(reader: ArtifactReader, folder: str) -> list[int]:
    return sorted(int(found[1]) for name in reader.names(folder) if (found := _VERSION.fullmatch(name)))


def _references(stages: Found) -> Stages:
    return {stage: tuple(part.reference for part in stages[stage].values()) for stage in STAGES if stages.get(stage)}


def _default(iterations: Mapping[int, Found]) -> int | None:
    """The last iteration with rewards; without one, the last with anything."""
    begun = [number for number in sorted(iterations) if iterations[number]]
    rated = [number for number in begun if "advantages" in iterations[number]]
    return next(reversed(rated or begun), None)


def _keep_whole(reader: ArtifactReader, groups: Sequence[Found], *, always: bool) -> None:
    """Drop what does not verify; a checkpoint's weights are large and never shown, so they wait for the budget."""
    for stages in groups:
        for stage, parts in list(stages.items()):
            if always and stage == "update":
                continue
            for part, artifact in list(parts.items()):
                if not (reader.verify(artifact) if always else reader.verify_within_budget(artifact)):
                    del parts[part]
            if not parts:
                del stages[stage]


def _last_policy(
    reader: ArtifactReader,
    policies: Mapping[int, StoredArtifact],
    iterations: Mapping[int, Found],
    described: Mapping[str, Any] | None,
) -> tuple[int, str | None]:
    """Version and digest of the last whole policy; of the given model where there is none."""
    for version in sorted(policies, reverse=True):
        kept = version == 0 or "update" in iterations.get(version, {})
        if kept and _STATE_FILE in policies[version].files and reader.verify(policies[version], [_STATE_FILE]):
            state = _read_json(reader, f"policies/{version:06d}/{_STATE_FILE}")
            return version, state.get("policy_digest")
    if described is None:
        reader.damaged(RUN_FILE, "it is missing")
    return 0, (described or {}).get("model_digest")


def _iteration_view(reader: ArtifactReader, number: int, stages: Found, heldout: float | None) -> IterationView:
    metrics: dict[str, float] = {}
    for parts in _with_every_round(stages).values():
        metrics |= pool_rounds(list(parts.values()))
    metrics = {name: value for name, value in metrics.items() if not name.startswith(RUNNING)}
    _compare_with_table(reader, number, metrics)
    seconds = _seconds(_with_every_round(stages))
    metrics |= {f"seconds/{stage}": spent for stage, spent in seconds.items()}
    metrics["step_time"] = sum(seconds.values())
    if heldout is not None:
        metrics["heldout_reward"] = heldout
    return IterationView(number, _references(stages), metrics, heldout)


Series = dict[tuple[str, str], dict[int, ArtifactRef]]
"""By stage and label, one a draw."""


def _with_every_round(stages: Found) -> Series:
    """What has figures of the whole iteration: nothing of a later draw that is still at work, and no torn stage."""
    series: Series = {}
    for stage in STAGES:
        for (draw, label), artifact in sorted(stages.get(stage, {}).items()):
            series.setdefault((stage, label), {})[draw] = artifact.reference
    scored = series.get(("advantages", ""))
    if scored is None:
        return series
    covered = range(1, 1 + int(next(iter(scored.values())).metrics.get("rounds", 1)))
    return {
        (stage, label): {draw: parts[draw] for draw in covered} if stage in STAGES[:2] else parts
        for (stage, label), parts in series.items()
        if stage not in STAGES[:2] or all(draw in parts for draw in covered)
    }


def _seconds(series: Series) -> dict[str, float]:
    """Of each stage; the rewards of a draw are computed side by side, so the slowest counts."""
    longest: dict[str, dict[int, float]] = {}
    for (stage, _), parts in series.items():
        for draw, part in parts.items():
            spent = longest.setdefault(stage, {})
            spent[draw] = max(spent.get(draw, 0.0), part.seconds)
    return {stage: sum(spent.values()) for stage, spent in longest.items()}


def _compare_with_table(reader: ArtifactReader, number: int, metrics: Mapping[str, float]) -> None:
    """The table of figures has no manifest of its own: what the stages say is what it must repeat."""
    name = f"iteration_{number:06d}/metrics.parquet"
    content = reader.read_bytes(name)
    if content is None:
        return
    try:
        rows = pq.ParquetFile(pa.BufferReader(content)).read(columns=["metric", "value"]).to_pydict()
    except (pa.ArrowException, OSError, ValueError) as error:
        reader.damaged(name, f"it is not a whole Parquet file ({type(error).__name__}); the stages' figures are shown")
        return
    told = dict(zip(rows["metric"], rows["value"], strict=True))
    differing = [metric for metric, value in metrics.items() if told.get(metric) != value]
    if differing:
        reader.damaged(name, f"{', '.join(differing[:3])} differ from the stages' figures, which are shown")


def _read_description(reader: ArtifactReader) -> Mapping[str, Any] | None:
    """What run.json says; None where it is missing."""
    content = reader.read_bytes(RUN_FILE)
    if content is None:
        return None
    try:
        return load_description(content)
    except ValueError as error:
        reader.damaged(RUN_FILE, str(error))
        return {}


def _read_config(reader: ArtifactReader, sha256: str | None) -> tuple[str | None, Mapping[str, Any]]:
    content = reader.read_bytes(CONFIG_FILE)
    if content is None:
        reader.damaged(CONFIG_FILE, "it is missing")
        return None, {}
    if sha256 not in (None, hashlib.sha256(content).hexdigest()):
        reader.damaged(CONFIG_FILE, "it is not what the run wrote")
    try:
        text = content.decode()
        values = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reader.damaged(CONFIG_FILE, f"it is not YAML ({type(error).__name__})")
        return None, {}
    if not isinstance(values, Mapping):
        reader.damaged(CONFIG_FILE, "it holds no sections")
        return text, {}
    return text, values


def _read_json(reader: ArtifactReader, name: str) -> Mapping[str, Any]:
    content = reader.read_bytes(name)
    if content is None:
        reader.damaged(name, "it is missing")
        return {}
    try:
        values = json.loads(content)
    except ValueError:
        reader.damaged(name, "it is not JSON")
        return {}
    return values if isinstance(values, Mapping) else {}


def _read_set_aside(reader: ArtifactReader) -> tuple[SetAside, ...]:
    found = []
    for name in reader.names(SET_ASIDE):
        note = _read_json(reader, f"{SET_ASIDE}/{name}/reason.json")
        paths = note.get("paths")
        reason = str(note.get("reason", "no reason is written"))
        moved = tuple(str(path) for path in paths) if isinstance(paths, list) else ()
        found.append(SetAside(f"{SET_ASIDE}/{name}", reason, moved))
    return tuple(found)
