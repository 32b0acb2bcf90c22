"""Stage 2: stored pictures or texts -> scores, one table a reward. Weights are not applied here."""

import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image

from configs.schema import PlacementSection, RewardSection
from grpo_core.rewards.protocol import Reward, Score, ScoringBatch
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.scoring import provenance_of, score_samples
from tasks.caching import stage_task
from tasks.models import configure_torch
from tasks.progress import progress_of
from tasks.storage.reference import ArtifactRef
from tasks.storage.schemas import REWARDS, SCHEMA_VERSION
from tasks.storage.store import current_store
from tasks.storage.tables import TableWriter, joint_digest
from tasks.targets import TargetReference, load_target

STAGE = "score rewards"
BATCH_SIZE = 32
_READ = ["sample_id", "dataset", "prompt", "columns"]
_READ_OF_PICTURES = ["target_uri", "target_sha256", "image"]
_READ_OF_TEXTS = ["completion"]


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    rewards: Sequence[RewardSection] = inputs["rewards"]
    return {
        "rollouts": inputs["rollouts"].digest,
        "rewards": [[section.label, section.datasets, provenance_of(_built(section))] for section in rewards],
    }


def _built(section: RewardSection) -> Reward:
    return build_reward(section.reward, section.settings)


@stage_task(STAGE, _describe)
def score_rewards_task(
    rollouts: ArtifactRef, rewards: tuple[RewardSection, ...], folder: str, title: str, placement: PlacementSection
) -> ArtifactRef:
    """Score every stored sample with every reward that is meant for its dataset."""
    started = time.perf_counter()
    configure_torch(placement)
    store = current_store()
    tell = progress_of(f"{title}: {STAGE}", len(rewards) * rollouts.rows)
    metrics: dict[str, float] = {}
    digests = []
    with tempfile.TemporaryDirectory() as fetched, store.staging() as staged:
        source = store.local_files(rollouts, Path(fetched))
        for index, section in enumerate(rewards):
            reward = _built(section)
            writer = TableWriter(staged / f"{section.label}.parquet", REWARDS)
            values = []
            for datasets, batch in _batches(source):
                wanted = [row for row, name in enumerate(datasets) if section.scores(name)]
                values += _score_batch(reward, batch, wanted, writer)
                tell(index * rollouts.rows + len(values), len(rewards) * rollouts.rows)
            digests.append(writer.close())
            metrics |= _statistics(section.label, values)
        return store.commit(
            staged,
            f"{folder}/rewards",
            digest=joint_digest(digests),
            schema_version=SCHEMA_VERSION,
            rows=rollouts.rows,
            seconds=time.perf_counter() - started,
            metrics=metrics,
        )


def _batches(source: Path) -> Iterator[tuple[list[str], ScoringBatch]]:
    """The dataset of each sample, and the samples."""
    targets: dict[str, Image.Image] = {}
    for path in sorted(source.glob("*.parquet")):
        file = pq.ParquetFile(path)
        pictures = "image" in file.schema_arrow.names
        for record in file.iter_batches(
            BATCH_SIZE, columns=_READ + (_READ_OF_PICTURES if pictures else _READ_OF_TEXTS)
        ):
            rows = record.to_pylist()
            outputs = _pictures(rows, targets) if pictures else {"completions": [row["completion"] for row in rows]}
            others = [json.loads(row["columns"]) for row in rows]
            batch = ScoringBatch(
                sample_ids=[row["sample_id"] for row in rows],
                prompts=[row["prompt"] for row in rows],
                columns={name: [row.get(name) for row in others] for name in sorted({n for c in others for n in c})},
                **outputs,
            )
            yield [row["dataset"] for row in rows], batch


def _pictures(rows: Sequence[Mapping[str, Any]], targets: dict[str, Image.Image]) -> dict[str, Any]:
    """Pictures with their targets; `targets` keeps those that were read."""
    for row in rows:
        uri = row["target_uri"]
        if uri is not None and uri not in targets:
            targets[uri] = load_target(TargetReference(uri, row["target_sha256"]))
    return {
        "images": [Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB") for row in rows],
        "targets": [targets.get(row["target_uri"]) for row in rows],
    }


def _score_batch(reward: Reward, batch: ScoringBatch, wanted: Sequence[int], writer: TableWriter) -> list[float | None]:
    """Score the wanted samples; the others are null."""
    begun = time.perf_counter()
    scored = batch.select(wanted)
    given = score_samples(reward, scored)
    share = (time.perf_counter() - begun) / max(1, len(wanted))
    by_row = dict(zip(wanted, given, strict=True))
    scores = [by_row.get(row, Score(None, None)) for row in range(len(batch))]
    writer.write(
        {
            "sample_id": list(batch.sample_ids),
            "value": [score.value for score in scores],
            "raw": [score.raw for score in scores],
            "seconds": [share if row in by_row else 0.0 for row in range(len(batch))],
            "provenance": [json.dumps(provenance_of(reward), sort_keys=True)] * len(batch),
        }
    )
    return [score.value for score in scores]


def _statistics(label: str, values: Sequence[float | None]) -> dict[str, float]:
    known = [value for value in values if value is not None]
    statistics_of = {f"rewards/{label}/null": float(len(values) - len(known))}
    if known:
        statistics_of[f"rewards/{label}/mean"] = statistics.fmean(known)
    if len(known) > 1:
        statistics_of[f"rewards/{label}/std"] = statistics.stdev(known)
    return statistics_of
