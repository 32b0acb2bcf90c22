"""Read a run folder into frozen records, whether the run is finished, stopped half-way, or still running."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.yaml_files import parse_yaml
from grpo_core.errors import InputError
from tasks.metrics import GUARDRAIL_PREFIX, HELDOUT, SECONDS, WALL_TIME, is_measured, stage_metrics
from tasks.runs import layout
from tasks.runs.hacking import hacking_verdict
from tasks.runs.lookup import CONFIG_FILE, CONFIG_SHA256, read_starts
from tasks.runs.reader import RunReader, StoredArtifact
from tasks.runs.run_view import EvaluationView, IterationView, RunView, StageArtifacts, means_of, rescoring_of
from tasks.runs.signs import find_signs
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import RUN_FILE, ArtifactStore
from tasks.storage.files import load_checked
from tasks.storage.parquet import read_checked, write_table
from tasks.storage.schemas import METRICS

_KEPT = (HELDOUT, WALL_TIME)
_IN_ORDER = (*layout.PREVIEW_STAGES, *layout.STAGES)


def gather_metrics(
    rounds: Sequence[layout.SamplingRound],
    advantages: ArtifactRef,
    update: ArtifactRef,
    evaluation: EvaluationView | None,
    previous: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the metrics of all stages of an iteration, with the seconds that each took when it ran.

    A replay has no rounds, since it samples none; `evaluation` is of the policy that the iteration made, and `previous`
    are the metrics of the iteration before.
    """
    stages: dict[tuple[str, str], list[ArtifactRef]] = {}
    for each in rounds:
        for key, reference in _sampled(each):
            stages.setdefault(key, []).append(reference)
    stages |= {(layout.ADVANTAGES, ""): [advantages], (layout.UPDATE, ""): [update]}
    metrics = {f"{SECONDS}{stage}": 0.0 for stage in layout.STAGES} | stage_metrics(
        stages, previous, sampling=layout.ROLLOUTS, unshown=layout.PREVIEW_STAGES
    )
    return metrics | ({} if evaluation is None else evaluation_metrics(evaluation))


def _sampled(part: layout.SamplingRound) -> Iterator[tuple[tuple[str, str], ArtifactRef]]:
    """Yield the artifacts of a sampling round by stage and reward label, those of its previews first."""
    if part.previews is not None:
        rollouts, rewards, advantages = layout.PREVIEW_STAGES
        yield (rollouts, ""), part.previews.rollouts
        yield from (((rewards, label), scores) for label, scores in part.previews.rewards.items())
        yield (advantages, ""), part.previews.advantages
    yield (layout.ROLLOUTS, ""), part.rollouts
    yield from (((layout.REWARDS, label), scores) for label, scores in part.rewards.items())


def evaluation_metrics(evaluation: EvaluationView) -> dict[str, float]:
    """Return the held-out reward, where a sample has one, and the mean of each guardrail by their metrics' names."""
    reward = {} if evaluation.reward is None else {HELDOUT: evaluation.reward}
    return reward | {f"{GUARDRAIL_PREFIX}{label}": mean for label, mean in evaluation.guardrails.items()}


def read_metrics(store: ArtifactStore, iteration: int) -> dict[str, float]:
    """Read the table that an earlier start wrote; empty where there is none, or a damaged one."""
    content = store.read_file(layout.metrics_file(iteration))
    with contextlib.suppress(ValueError):
        return {} if content is None else _read_table(content)
    return {}


def with_earlier(metrics: Mapping[str, float], earlier: Mapping[str, float], wall_time: float) -> dict[str, float]:
    """Add what only the start that ran an iteration knows, from its table: time on the clock, and evaluations."""
    kept = {name: value for name, value in earlier.items() if name in _KEPT or name.startswith(GUARDRAIL_PREFIX)}
    if earlier:
        return {**kept, **metrics}
    # An iteration lasts at least as long as its update: in less time a stored one was passed, whose time is not known.
    is_own = wall_time >= metrics.get(f"{SECONDS}{layout.UPDATE}", 0.0)
    return {**metrics, WALL_TIME: wall_time} if is_own else dict(metrics)


def write_metrics(store: ArtifactStore, iteration: int, metrics: Mapping[str, float]) -> None:
    """Write the iteration's table, a row per metric."""
    names = sorted(metrics)
    columns: dict[str, list[Any]] = {
        "iteration": [iteration] * len(names),
        "metric": names,
        "value": [metrics[name] for name in names],
    }
    with store.scratch() as folder:
        path = folder / "metrics.parquet"
        write_table(path, METRICS, columns)
        store.write_file(layout.metrics_file(iteration), path.read_bytes())


def _read_table(content: bytes) -> dict[str, float]:
    """Read the values of a table by their metrics; ValueError for a damaged one."""
    columns = read_checked(content, METRICS)
    return dict(zip(columns["metric"], columns["value"], strict=True))


Found = dict[str, dict[tuple[int, str], StoredArtifact]]
"""Artifacts by stage, then by sampling round from 1 and reward label; advantages are those of the last round."""


def read_run(reader: RunReader, shown: int | None = None) -> RunView:
    """Read a run. Everything that is shown is verified, and of the rest as much as about a second of reading allows.

    `shown` is an iteration; None for the last one with advantages, or without one the last that has any stage.
    """
    reader.list_files()
    iterations, policies = _find_iterations(reader)
    evaluations = {version: _find_stages(reader, layout.evaluation_folder(version)) for version in reader.evaluations()}
    chosen = _choose_shown(iterations) if shown is None else shown
    _verify(reader, iterations, evaluations, chosen)
    described = _read_description(reader)
    kept = {version: found for version, found in policies.items() if layout.UPDATE in iterations[version]}
    latest = _last_policy(reader, kept)
    if latest is None and described is None:
        reader.report_damage(RUN_FILE, "it is missing")
    version, digest = latest or (0, (described or {}).get("model_digest"))
    heldout = tuple(
        EvaluationView(number, _references(stages), _read_guardrails(reader, layout.evaluation_folder(number)))
        for number, stages in evaluations.items()
    )
    views = _iteration_views(reader, iterations, {view.version: view.reward for view in heldout})
    config_text, config = _read_config(reader, (described or {}).get(CONFIG_SHA256))
    run = RunView(
        name=reader.store.run,
        folder=reader.store.path(),
        starts=read_starts(reader),
        config_text=config_text,
        config=config,
        iterations=views,
        shown=next((view for view in views if view.iteration == chosen), None),
        evaluations=heldout,
        evaluated_last=reader.has_evaluated(version, config),
        baselines=_read_baselines(reader),
        policy_version=version,
        policy_digest=digest,
        trained_on=rescoring_of(config.get("replay")),
        moved=tuple(reader.moved_files()),
        damages=tuple(reader.damages),
        unverified=reader.unverified,
    )
    run.signs = (*find_signs(run.iterations, run.stream), *hacking_verdict(run).signs)
    return run


def _find_iterations(reader: RunReader) -> tuple[dict[int, Found], dict[int, StoredArtifact]]:
    iterations = {number: _find_stages(reader, layout.iteration_folder(number)) for number in reader.iterations()}
    policies = {
        version: found for version in reader.policies() if (found := reader.find(layout.policy_folder(version)))
    }
    for version, found in policies.items():
        iterations.setdefault(version, {})[layout.UPDATE] = {(1, ""): found}
    return iterations, policies


def _choose_shown(iterations: Mapping[int, Found]) -> int | None:
    """Return the last iteration with advantages, or without one the last that has any stage."""
    begun = [number for number in sorted(iterations) if iterations[number]]
    rated = [number for number in begun if layout.ADVANTAGES in iterations[number]]
    return next(reversed(rated or begun), None)


def _verify(
    reader: RunReader, iterations: Mapping[int, Found], evaluations: Mapping[int, Found], shown: int | None
) -> None:
    """Drop what is damaged of the shown iteration and of both ends of the evaluations, then as the budget allows."""
    scored = [version for version, stages in evaluations.items() if layout.ADVANTAGES in stages]
    _drop_damaged(reader, [iterations.get(shown or 0, {})], always=True)
    _drop_damaged(reader, [evaluations[version] for version in {*scored[:1], *scored[-1:]}], always=True)
    _drop_damaged(reader, [*iterations.values(), *evaluations.values()], always=False)


def _find_stages(reader: RunReader, folder: str) -> Found:
    stages: Found = {}
    for number, each in enumerate(reader.rounds(folder), start=1):
        sampled, rated, compared = layout.PREVIEW_STAGES
        with_previews = layout.PREVIEWS in reader.names(each)
        for stage in (sampled, compared, layout.ROLLOUTS) if with_previews else (layout.ROLLOUTS,):
            if found := reader.find(f"{each}/{stage}"):
                stages.setdefault(stage, {})[number, ""] = found
        for stage in (rated, layout.REWARDS) if with_previews else (layout.REWARDS,):
            for label in reader.artifact_names(f"{each}/{stage}"):
                if found := reader.find(f"{each}/{stage}/{label}"):
                    stages.setdefault(stage, {})[number, label] = found
    scored = reader.scored_rounds(folder)
    if scored and (found := reader.find(f"{scored[-1]}/{layout.ADVANTAGES}")):
        stages[layout.ADVANTAGES] = {(len(scored), ""): found}
    return stages


def read_evaluation(reader: RunReader, version: int, of: str | None = None) -> EvaluationView | None:
    """Read the verified evaluation of a version, on others' prompts by their name; None without rewards."""
    folder = layout.evaluation_folder(version, of)
    stages = _find_stages(reader, folder)
    _drop_damaged(reader, [stages], always=True)
    if layout.ROLLOUTS not in stages or layout.ADVANTAGES not in stages:
        return None
    return EvaluationView(version, _references(stages), _read_guardrails(reader, folder))


def _read_guardrails(reader: RunReader, evaluation: str) -> dict[str, float]:
    folder = f"{evaluation}/{layout.GUARDRAILS}"
    found = {label: reader.find(f"{folder}/{label}") for label in reader.artifact_names(folder)}
    return means_of({label: each.reference for label, each in found.items() if each is not None})


def _read_baselines(reader: RunReader) -> dict[str, float]:
    found = {name: reader.find(f"{layout.baseline_folder(name)}/{layout.ADVANTAGES}") for name in layout.BASELINES}
    valid = {name: each.reference.metrics for name, each in found.items() if each is not None and reader.verify(each)}
    return {name: metrics["reward"] for name, metrics in valid.items() if "reward" in metrics}


def _references(stages: Found) -> StageArtifacts:
    return {
        stage: tuple(part.reference for part in stages[stage].values()) for stage in layout.STAGES if stages.get(stage)
    }


def _drop_damaged(reader: RunReader, groups: Sequence[Found], *, always: bool) -> None:
    """Drop what does not verify; checkpoints, which are large and never shown, are verified within the budget."""
    for stages in groups:
        for stage, parts in list(stages.items()):
            if always and stage == layout.UPDATE:
                continue
            for part, artifact in list(parts.items()):
                if not (reader.verify(artifact) if always else reader.verify_within_budget(artifact)):
                    del parts[part]
            if not parts:
                del stages[stage]


def _last_policy(reader: RunReader, policies: Mapping[int, StoredArtifact]) -> tuple[int, str | None] | None:
    """Return the version and digest of the last valid policy; None without one."""
    for version in sorted(policies, reverse=True):
        if layout.STATE_FILE in policies[version].manifest.files and reader.verify(
            policies[version], [layout.STATE_FILE]
        ):
            return version, reader.read_json(f"{layout.policy_folder(version)}/{layout.STATE_FILE}").get(
                "policy_digest"
            )
    return None


def _iteration_views(
    reader: RunReader, iterations: Mapping[int, Found], rewards: Mapping[int, float | None]
) -> tuple[IterationView, ...]:
    """Return the iterations that have a stage, in order; each continues the metrics of the one before."""
    views: list[IterationView] = []
    for number, stages in sorted(iterations.items()):
        if not stages:
            continue
        before = views[-1].metrics if views and views[-1].iteration == number - 1 else {}
        covered, previous = _covered_rounds(stages), None if number == 1 else before
        metrics = stage_metrics(covered, previous, sampling=layout.ROLLOUTS, unshown=layout.PREVIEW_STAGES)
        _compare_with_table(reader, number, metrics)
        if (reward := rewards.get(number)) is not None:
            metrics[HELDOUT] = reward
        views.append(IterationView(number, _references(stages), metrics))
    return tuple(views)


def _covered_rounds(stages: Found) -> dict[tuple[str, str], list[ArtifactRef]]:
    """Return the artifacts by stage and label that cover each sampling round which the advantages cover."""
    series: dict[tuple[str, str], dict[int, ArtifactRef]] = {}
    for stage in _IN_ORDER:
        for (sampling_round, label), artifact in sorted(stages.get(stage, {}).items(), key=lambda item: item[0]):
            series.setdefault((stage, label), {})[sampling_round] = artifact.reference
    for scored in series.get((layout.ADVANTAGES, ""), {}).values():
        covered = range(1, 1 + int(scored.metrics.get("rounds", 1)))
        for key in [key for key in series if key[0] not in (layout.ADVANTAGES, layout.UPDATE)]:
            parts = series.pop(key)
            if all(each in parts for each in covered):
                series[key] = {each: parts[each] for each in covered}
    ordered = sorted(series.items(), key=lambda item: _IN_ORDER.index(item[0][0]))
    return {key: list(parts.values()) for key, parts in ordered}


def _compare_with_table(reader: RunReader, number: int, metrics: Mapping[str, float]) -> None:
    """Compare with the table of metrics, which has no manifest of its own: it must repeat what the stages state."""
    name = layout.metrics_file(number)
    content = reader.read_bytes(name)
    if content is None:
        return
    try:
        written = _read_table(content)
    except ValueError as error:
        reader.report_damage(name, f"{error}; the stages' metrics are shown")
        return
    compared = {metric for metric in metrics if not is_measured(metric)}
    differing = sorted(metric for metric in compared if written.get(metric) != metrics[metric])
    if differing:
        reader.report_damage(name, f"{', '.join(differing[:3])} differ from the stages' metrics, which are shown")


def _read_description(reader: RunReader) -> Mapping[str, Any] | None:
    """Read run.json; empty where it is damaged, None where it is missing."""
    content = reader.read_bytes(RUN_FILE)
    try:
        return None if content is None else load_checked(content)
    except ValueError as error:
        reader.report_damage(RUN_FILE, str(error))
        return {}


def _read_config(reader: RunReader, sha256: str | None) -> tuple[str | None, Mapping[str, Any]]:
    content = reader.read_bytes(CONFIG_FILE)
    if content is None:
        reader.report_damage(CONFIG_FILE, "it is missing")
        return None, {}
    try:
        text = content.decode()
        values = parse_yaml(text, CONFIG_FILE)
    except (UnicodeDecodeError, InputError) as error:
        reader.report_damage(CONFIG_FILE, f"it is not YAML ({error})")
        return None, {}
    if not isinstance(values, Mapping):
        reader.report_damage(CONFIG_FILE, "it has no sections")
        return text, {}
    if sha256 not in (None, hashlib.sha256(content).hexdigest()):
        reader.report_damage(CONFIG_FILE, "it is not what the run wrote")
    return text, values
