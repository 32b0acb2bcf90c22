"""Stage 2: stored images or texts -> the scores of one reward. Weights are not applied here.

A reward's scope (`datasets`, `where`) says which samples it scores; the provenance says what their scores come from. A
sample out of scope has neither a score nor a provenance, so a wider scope only adds samples and a narrower one none.
"""

import json
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from configs.placement import PlacementSection
from configs.scoring import RewardSection
from grpo_core.errors import FailedSamplesError
from grpo_core.rewards.registry import build_reward, reward_reference
from grpo_core.rewards.reward import provenance_of
from grpo_core.user_code.files import code_kept
from tasks.execution.caching import stage_task
from tasks.execution.stage import SHARDS, Arguments, Part, Sharding, shard_folder
from tasks.metrics import LOGGED, pool_logged
from tasks.models.devices import set_threads
from tasks.progress import progress_of
from tasks.rewards.score_rows import EXTRA, LOGGED_BY, SCORES, Row, batches_for, score_in_processes, score_rows
from tasks.runs.layout import EXTRA_COLUMN, EXTRA_FILE, IMAGES, PARTS, SCORES_FILE, STATES
from tasks.runs.reader import refuse_lost
from tasks.runs.samples import ONE_EACH
from tasks.storage.artifacts.commit import IMAGES_REMOVED, commit_artifact
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, Read, current_store
from tasks.storage.parquet import read_columns, scan_tables, write_table
from tasks.storage.schemas import REWARDS


def provenance_json(section: RewardSection) -> str:
    """Describe where a section's scores come from, stored with each: the same text means the same score."""
    return json.dumps(provenance_of(build_reward(section.reward, section.settings)), sort_keys=True)


def scores_key(section: RewardSection) -> tuple[str, str]:
    """Return the provenance and the scope of a section's scores: tables of the same rollouts with both are the same."""
    return provenance_json(section), json.dumps([section.datasets, section.where], sort_keys=True)


def in_scope(section: RewardSection, samples: pl.DataFrame) -> pl.DataFrame:
    """Return the samples that a section scores; they have the columns dataset and columns."""
    prompts = samples.select("dataset", "columns").unique()
    scored = [section.scores_prompt(dataset, json.loads(columns)) for dataset, columns in prompts.iter_rows()]
    return samples.join(prompts.filter(pl.Series(scored, dtype=pl.Boolean)), on=["dataset", "columns"], how="semi")


def samples_to_score(section: RewardSection, samples: pl.DataFrame, scored: Collection[str]) -> frozenset[str]:
    """Return the samples in scope that have no score yet, with their siblings if a score depends on them."""
    meant = in_scope(section, samples)
    missing = meant.filter(~pl.col("sample_id").is_in(list(scored)))
    if build_reward(section.reward, section.settings).needs.group:
        missing = meant.filter(pl.col("group_id").is_in(missing["group_id"].to_list()))
    return frozenset(missing["sample_id"])


def failed_scores(reference: ArtifactRef) -> int:
    """Count the samples of the table that could not be scored."""
    label = reference.folder.rsplit("/", 1)[-1]
    return int(reference.metrics.get(f"rewards/{label}/failed", 0.0))


@dataclass(frozen=True)
class NeededScores:
    """The scores that a reward needs over one sampling round."""

    section: RewardSection
    stored: ArtifactRef | None  # the table with exactly these scores; None if there is none
    earlier: tuple[ArtifactRef, ...]  # without such a table, the tables with some of them
    missing: int  # number of samples to score; 0 if their scores only have to be gathered in a table


class StoredScores:
    """The tables of scores of one sampling round, from any run; each is read once."""

    def __init__(self, store: ArtifactStore, rollouts: ArtifactRef, candidates: Sequence[ArtifactRef]) -> None:
        def read(reference: ArtifactRef, files: str, *columns: str) -> pl.DataFrame:
            return pl.DataFrame(read_columns(store.filesystem, f"{store.root}/{reference.uri}", files, columns))

        self._samples = read(rollouts, PARTS, "sample_id", "group_id", "dataset", "columns")
        self._tables = [
            (each, read(each, SCORES_FILE, "sample_id", "failure", "provenance").drop_nulls("provenance"))
            for each in candidates
        ]

    def needed(self, section: RewardSection) -> NeededScores:
        """Find the table of a section's scores, or what has to be scored without one."""
        wanted = provenance_json(section)
        meant = frozenset(in_scope(section, self._samples)["sample_id"])
        earlier: list[ArtifactRef] = []
        scored: set[str] = set()
        for reference, table in self._tables:
            own = table.filter(pl.col("provenance") == wanted)
            valid = own.filter(pl.col("failure").is_null())["sample_id"]
            if meant == set(valid) and len(table) == len(valid):
                return NeededScores(section, reference, (), 0)
            if len(own):
                earlier.append(reference)
                scored.update(valid)
        missing = samples_to_score(section, self._samples, scored)
        return NeededScores(section, None, tuple(earlier), len(missing))


def joined_folder(folder: str) -> str:
    """Return the folder of the complete table for the folder of a shard."""
    place, found, rest = folder.partition(f"/{SHARDS}/")
    return f"{place}/{rest.partition('/')[2]}" if found else folder


STAGE = "score reward"
_SCORES = pl.Schema({name: pl.String if name in ("sample_id", "failure") else pl.Float64 for name in SCORES})


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    section: RewardSection = inputs["section"]
    return {
        "rollouts": inputs["rollouts"].digest,
        "scores": scores_key(section),
        # A rescoring keeps separate tables, even with equal scores.
        "place": [inputs["folder"], section.label],
        **({} if inputs.get("part") is None else {"part": inputs["part"]}),
    }


def _modules(arguments: Arguments) -> tuple[str, ...]:
    return (reward_reference(arguments["section"].reward),)


def _functions(arguments: Arguments) -> tuple[str, ...]:
    section = arguments["section"]
    return tuple(filter(None, [build_reward(section.reward, section.settings).user_function]))


def _cut(arguments: Arguments, shards: int) -> list[Part]:
    """Split into as many parts as there are shards; some may be empty, since the groups are not counted yet."""
    title = arguments["title"]
    place, _, last = arguments["folder"].rpartition("/")
    parts = []
    for index in range(shards):
        own = f"{title}, shard {index + 1} of {shards}"
        folder = f"{shard_folder(place, index, shards)}/{last}"
        change = {"folder": folder, "title": own, "placement": arguments["placement"].uncut(), "part": (index, shards)}
        parts.append(Part(f"{own}: score {arguments['section'].label}", {**arguments, **change}))
    return parts


def _join(arguments: Arguments, parts: Sequence[ArtifactRef]) -> ArtifactRef:
    """Join the shards' rows in one table, unless together more samples could not be scored than is allowed."""
    started = time.perf_counter()
    store, section = current_store(), arguments["section"]
    with store.reading(without=(IMAGES, STATES)) as read, store.staging() as staged:
        source = read(arguments["rollouts"])
        folders = [read(part) for part in parts]
        table = scan_tables([folder / SCORES_FILE for folder in folders]).collect()
        failures = table.filter(pl.col("failure").is_not_null()).select("sample_id", "failure").rows()
        _require_enough(section, [f"{name}: {why}" for name, why in failures], len(in_scope(section, _samples(source))))
        # Shards are scored in parallel.
        slowest = max(part.seconds for part in parts)
        label, logged = section.label, pool_logged(parts)
        _write_extra(staged, _extras(read, parts))
        return _commit(store, staged, arguments["folder"], label, table, started - slowest, logged)


def _commit(
    store: ArtifactStore,
    staged: Path,
    folder: str,
    label: str,
    table: pl.DataFrame,
    started: float,
    logged: Mapping[str, float],
) -> ArtifactRef:
    digest = write_table(staged / SCORES_FILE, REWARDS, table.to_dict(as_series=False))
    return commit_artifact(
        store,
        staged,
        f"{folder}/{label}",
        digest=digest,
        rows=table.height,
        seconds=time.perf_counter() - started,
        metrics={**_statistics(label, table), **logged},
    )


def _require_enough(section: RewardSection, failed: Sequence[str], meant: int) -> None:
    """Stop once more than section.max_failures of the samples that the reward is meant for could not be scored."""
    if len(failed) > section.max_failures * meant:
        raise FailedSamplesError(section.label, failed, meant, section.max_failures)


@stage_task(STAGE, _describe, kind="rewards", sharding=Sharding(_cut, _join), modules=_modules, functions=_functions)
def score_reward_task(
    rollouts: ArtifactRef,
    section: RewardSection,
    folder: str,
    title: str,
    placement: PlacementSection,
    earlier: tuple[ArtifactRef, ...] = (),
    part: tuple[int, int] | None = None,
    folders: tuple[str, ...] = (),
) -> ArtifactRef:
    """Score every stored sample in the reward's scope; the others get a row without score and provenance.

    What tables with scores of the same provenance, `earlier`, have is not scored again; `part` is a shard of the
    groups,
    from 0, and of how many. InputError for images that were removed or are damaged, FailedSamplesError for too many.
    """
    started = time.perf_counter()
    set_threads(placement)
    store, reward = current_store(), build_reward(section.reward, section.settings)
    provenance = provenance_json(section)
    with store.reading(without=(STATES,)) as read, store.staging() as staged:
        known = _known_scores(read, earlier, provenance)
        source = read(rollouts)
        everything = _samples(source)
        samples = _shard(everything, part)
        wanted = samples_to_score(section, samples, known["sample_id"])
        if wanted:
            place = joined_folder(f"{folder}/{section.label}")
            refuse_lost(store, rollouts, place, IMAGES_REMOVED, as_read=True)
        report_progress = progress_of(f"{title}: score {section.label}", len(wanted))
        meant = in_scope(section, everything).select("sample_id", provenance=pl.lit(provenance))
        whose = source, wanted, store, rollouts.run, folders
        results: Iterable[list[Row]] = ()
        if wanted and section.processes:
            results = score_in_processes(section, *whose)
        elif wanted:
            results = (score_rows(reward, section, batch) for batch in batches_for(reward, section, *whose))
        with code_kept(f"rewards.{section.label}", filter(None, [reward.user_function])):
            made, logged, extra = _gather(section, results, meant.height, report_progress)
        # A score that a sibling's score depends on was computed again.
        scored = meant.join(pl.concat([known, made]).unique("sample_id", keep="last"), **ONE_EACH)
        table = samples.select("sample_id", "iteration", reward=pl.lit(section.label)).join(scored, **ONE_EACH)
        table = table.with_columns(pl.col("seconds").fill_null(0.0))
        still_known = pl.col("sample_id").is_in(known["sample_id"].to_list())
        _write_extra(staged, [*(each.filter(still_known) for each in _extras(read, earlier)), extra])
        return _commit(store, staged, folder, section.label, table, started, logged)


def _extras(read: Read, tables: Sequence[ArtifactRef]) -> list[pl.DataFrame]:
    files = [read(each) / EXTRA_FILE for each in tables]
    return [scan_tables([file]).collect() for file in files if file.is_file()]


def _write_extra(staged: Path, tables: Sequence[pl.DataFrame]) -> None:
    """Write what a function reported about samples; no file where it reported nothing."""
    if columns := [each for each in tables if each.width > 1]:
        file = staged / EXTRA_FILE
        file.parent.mkdir()
        pl.concat(columns, how="diagonal_relaxed").unique("sample_id", keep="last", maintain_order=True).write_parquet(
            file
        )


def _known_scores(read: Read, earlier: Sequence[ArtifactRef], provenance: str) -> pl.DataFrame:
    """Return the earlier scores that stay valid, the last of each sample; failed samples are scored again."""
    tables = [pl.DataFrame(schema=_SCORES)]
    for reference in earlier:
        table = scan_tables([read(reference) / SCORES_FILE]).collect()
        standing = table.filter(pl.col("failure").is_null() & (pl.col("provenance") == provenance))
        tables.append(standing.select(_SCORES.names()))
    return pl.concat(tables).unique("sample_id", keep="last")


def _samples(source: Path) -> pl.DataFrame:
    columns = ["sample_id", "iteration", "group_id", "dataset", "columns"]
    return scan_tables(sorted(source.glob(PARTS))).select(columns).collect()


def _shard(samples: pl.DataFrame, part: tuple[int, int] | None) -> pl.DataFrame:
    if part is None:
        return samples
    index, count = part
    groups = samples["group_id"].unique(maintain_order=True)
    first, last = index * len(groups) // count, (index + 1) * len(groups) // count
    return samples.filter(pl.col("group_id").is_in(groups[first:last].to_list()))


def _gather(
    section: RewardSection, results: Iterable[list[Row]], meant: int, report_progress: Callable[[int], None]
) -> tuple[pl.DataFrame, dict[str, float], pl.DataFrame]:
    """Return scores, metrics that the reward reported, and columns of samples; stop once too many of `meant` failed."""
    scored: list[Row] = []
    failed: list[str] = []
    for rows in results:
        scored += rows
        failed += [f"{row['sample_id']}: {row['failure']}" for row in rows if row["failure"] is not None]
        _require_enough(section, failed, meant)
        report_progress(len(scored))
    logged: dict[str, list[float]] = {}
    for row in scored:
        for name, value in row[LOGGED_BY].items():
            logged.setdefault(name, []).append(value)
    columns = {name: [row[name] for row in scored] for name in SCORES}
    metrics = {f"{LOGGED}{name}": statistics.fmean(each) for name, each in logged.items()}
    return pl.DataFrame(columns, _SCORES), metrics, _extra_of(scored)


def _extra_of(rows: Sequence[Row]) -> pl.DataFrame:
    extra = {"sample_id": pl.Series([row["sample_id"] for row in rows], dtype=pl.String)}
    for name in dict.fromkeys(name for row in rows for name in row[EXTRA]):
        values = [row[EXTRA].get(name) for row in rows]
        if any(isinstance(value, str) for value in values):
            texts = [None if value is None else str(value) for value in values]
            column = pl.Series(texts, dtype=pl.String)
        else:
            column = pl.Series([None if value is None else float(value) for value in values], dtype=pl.Float64)
        # A function may name a column as it likes.
        extra[f"{EXTRA_COLUMN}{name}"] = column
    return pl.DataFrame(extra)


def _statistics(label: str, table: pl.DataFrame) -> dict[str, float]:
    known, failed = table["value"].drop_nulls().to_list(), float(table["failure"].count())
    statistics_of = {f"rewards/{label}/null": float(table.height - len(known)), f"rewards/{label}/failed": failed}
    if known:
        statistics_of[f"rewards/{label}/mean"] = statistics.fmean(known)
    if len(known) > 1:
        statistics_of[f"rewards/{label}/std"] = statistics.stdev(known)
    return statistics_of
