"""Replays of a run, and what came of them."""

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from configs.validation import validated
from flows.pipeline.requests import ReplayRequest
from flows.replaying import ReplaySummary, replay
from tasks.runs.layout import IMAGES
from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import Heard, Runs, heard_of, sha256_of

UPDATES = ("iteration 1: update policy", "iteration 2: update policy")


def request_replay(runs: Runs, *overrides: str, **options: Any) -> ReplayRequest:
    values = {"source": "run", "root": str(runs.root), "overrides": list(overrides), **options}
    return validated(ReplayRequest, values)


def run_replay(runs: Runs, *overrides: str, **options: Any) -> tuple[ReplaySummary, Heard]:
    """Replay the run in this process: its summary, and what was heard of it."""
    return heard_of(lambda: asyncio.run(replay(request_replay(runs, *overrides, **options))))


def advantages(runs: Runs, iteration: int, run: str = "run-replay") -> pl.DataFrame:
    return pl.read_parquet(runs.path(f"iteration_{iteration:06d}/advantages/advantages.parquet", run=run))


def rewrite(
    runs: Runs, folder: str, change: Callable[[pl.DataFrame], pl.DataFrame], *, to: str | None = None
) -> ArtifactRef:
    """Commit a changed copy of an artifact of the source, in its place or in another one."""
    store = ArtifactStore(str(runs.root), "run")
    previous = store.find(folder)
    assert previous is not None
    with store.staging() as staged:
        for path in sorted(store.local_files(previous).glob("*.parquet")):
            if path.match(IMAGES):
                shutil.copyfile(path, staged / path.name)
                continue
            schema = pq.read_schema(path)
            table = change(pl.DataFrame(pl.from_arrow(pq.read_table(path)))).to_arrow()
            columns = [table[name].combine_chunks().cast(schema.field(name).type) for name in schema.names]
            pq.write_table(pa.table(columns, schema=schema), staged / path.name)
        digest = hashlib.sha256(f"{previous.digest} {to} {sha256_of(staged)}".encode()).hexdigest()
        fields = previous.model_dump(exclude={"uri", "sha256", "digest"})
        return commit_artifact(store, staged, to or folder, digest=digest, **fields)


def of_first_group(table: pl.DataFrame) -> pl.Expr:
    return pl.col("group_id") == table["group_id"][0]
