"""A run as it lies on disk -> frozen records, whether it is finished, stopped half-way, or still running."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tasks.reports.artifact_reader import ArtifactReader, StoredArtifact
from tasks.reports.run_records import STAGES, EvaluationView, IterationView, RunView, SetAside
from tasks.storage.reference import ArtifactRef
from tasks.storage.store import SET_ASIDE

_ITERATION = re.compile(r"iteration_(\d{6,})")
_VERSION = re.compile(r"(\d{6,})\.manifest\.json")
_STATE_FILE = "training_state.json"


def is_run(reader: ArtifactReader) -> bool:
    """Whether the folder looks like a run's."""
    names = reader.names()
    return "run.json" in names or any(_ITERATION.fullmatch(name) for name in names)


def iteration_numbers(reader: ArtifactReader) -> list[int]:
    """Iterations that have a folder, in order."""
    return sorted(int(found[1]) for name in reader.names() if (found := _ITERATION.fullmatch(name)))


def read_run(reader: ArtifactReader, shown: int | None = None) -> RunView:
    """Read a run; what is shown is verified whole, the rest as far as a second or so of reading allows.

    Args:
        reader: at the run.
        shown: the iteration to show; by default the last one whose pictures have rewards.
    """
    iterations = {number: _find_stages(reader, f"iteration_{number:06d}") for number in iteration_numbers(reader)}
    versions = _versions(reader, "policies")
    policies = {version: found for version in versions if (found := reader.find(f"policies/{version:06d}"))}
    for version, found in policies.items():
        if version > 0:
            iterations.setdefault(version, {})["update"] = found
    evaluated = sorted({int(name) for name in reader.names("evaluations") if name.isdigit()})
    evaluations = {version: _find_stages(reader, f"evaluations/{version:06d}") for version in evaluated}
    chosen = _default(iterations) if shown is None else shown
    scored = [version for version, stages in evaluations.items() if "advantages" in stages]
    _keep_whole(reader, [iterations.get(chosen or 0, {})], always=True)
    _keep_whole(reader, [evaluations[version] for version in dict.fromkeys([*scored[:1], *scored[-1:]])], always=True)
    _keep_whole(reader, [*iterations.values(), *evaluations.values()], always=False)
    version, digest = _last_policy(reader, policies, iterations)
    heldout = tuple(EvaluationView(number, _references(stages)) for number, stages in evaluations.items())
    rewards = {view.version: view.reward for view in heldout}
    views = tuple(
        _iteration_view(reader, number, _references(stages), rewards.get(number))
        for number, stages in sorted(iterations.items())
        if stages
    )
    config_text, config = _read_config(reader)
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


Stages = dict[str, StoredArtifact]


def _find_stages(reader: ArtifactReader, folder: str) -> Stages:
    return {stage: found for stage in STAGES[:-1] if (found := reader.find(f"{folder}/{stage}"))}


def _versions(reader: ArtifactReader, folder: str) -> list[int]:
    return sorted(int(found[1]) for name in reader.names(folder) if (found := _VERSION.fullmatch(name)))


def _references(stages: Stages) -> dict[str, ArtifactRef]:
    return {stage: stages[stage].reference for stage in STAGES if stage in stages}


def _default(iterations: Mapping[int, Stages]) -> int | None:
    """The last iteration with rewards; without one, the last with anything."""
    begun = [number for number in sorted(iterations) if iterations[number]]
    rated = [number for number in begun if "advantages" in iterations[number]]
    return next(reversed(rated or begun), None)


def _keep_whole(reader: ArtifactReader, groups: Sequence[Stages], *, always: bool) -> None:
    """Drop what does not verify; a checkpoint's weights are large and never shown, so they wait for the budget."""
    for stages in groups:
        for stage, artifact in list(stages.items()):
            large = stage == "update"
            if always and large:
                continue
            if not (reader.verify(artifact) if always else reader.verify_within_budget(artifact)):
                del stages[stage]


def _last_policy(
    reader: ArtifactReader, policies: Mapping[int, StoredArtifact], iterations: Mapping[int, Stages]
) -> tuple[int, str | None]:
    """Version and digest of the last whole policy; of the given model where there is none."""
    for version in sorted(policies, reverse=True):
        kept = version == 0 or "update" in iterations.get(version, {})
        if kept and _STATE_FILE in policies[version].files and reader.verify(policies[version], [_STATE_FILE]):
            state = _read_json(reader, f"policies/{version:06d}/{_STATE_FILE}")
            return version, state.get("policy_digest")
    return 0, _read_json(reader, "run.json").get("model_digest")


def _iteration_view(
    reader: ArtifactReader, number: int, stages: Mapping[str, ArtifactRef], heldout: float | None
) -> IterationView:
    metrics: dict[str, float] = {}
    for reference in stages.values():
        metrics |= reference.metrics
    _compare_with_table(reader, number, metrics)
    metrics |= {f"seconds/{stage}": reference.seconds for stage, reference in stages.items()}
    metrics["step_time"] = sum(reference.seconds for reference in stages.values())
    if heldout is not None:
        metrics["heldout_reward"] = heldout
    return IterationView(number, stages, metrics, heldout)


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


def _read_config(reader: ArtifactReader) -> tuple[str | None, Mapping[str, Any]]:
    content = reader.read_bytes("config.yaml")
    if content is None:
        reader.damaged("config.yaml", "it is missing")
        return None, {}
    try:
        text = content.decode()
        values = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reader.damaged("config.yaml", f"it is not YAML ({type(error).__name__})")
        return None, {}
    if not isinstance(values, Mapping):
        reader.damaged("config.yaml", "it holds no sections")
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
