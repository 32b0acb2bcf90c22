"""A run of four updates, to be pruned."""

import hashlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from flows.pruning.prune import PruneSummary, prune
from flows.pruning.request import PruneRequest
from tests.flows.conftest import EVALUATED, Runs, Start

RUN = "pruned"
ITERATIONS = 4
# Deletes every kind of artifact that a prune can.
EVERYTHING: dict[str, Any] = {"policies_last": 1, "images_older_than": "0i"}


@pytest.fixture(scope="package")
def trained(server: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Start]:
    """An image run of four updates, evaluated at 0, 2 and 4; no test changes it."""
    runs = Runs(tmp_path_factory.mktemp("pruned"))
    return runs, runs.start(RUN, run__iterations=ITERATIONS, **EVALUATED)


@pytest.fixture
def runs(trained: tuple[Runs, Start], tmp_path: Path) -> Runs:
    """A copy of it."""
    return trained[0].copied_to(tmp_path / "runs")


def pruned(runs: Runs, *sources: str, **requested: Any) -> PruneSummary:
    return prune(PruneRequest(sources=sources or (RUN,), root=str(runs.root), **requested))


def deleted(summary: PruneSummary, index: int = 0) -> dict[str, int]:
    return {each.kind: each.count for each in summary.runs[index].deleted}


def kept(summary: PruneSummary, kind: str) -> dict[str, str]:
    return {name: each.reason for each in summary.runs[0].kept if each.kind == kind for name in each.names}


def again(runs: Runs, **changes: object) -> Start:
    """Start the pruned run once more."""
    return runs.start(RUN, **{"run__iterations": ITERATIONS, **EVALUATED, **changes})


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file and folder with its time, and the sha256 of a file."""
    return {
        path.relative_to(folder).as_posix(): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


def contents(folder: Path) -> dict[str, str]:
    """Every file except locks."""
    return {name: sha for name, (_, sha) in tree(folder).items() if sha and "lock" not in name}


def best(runs: Runs) -> int:
    """The version whose held-out samples have the highest mean reward."""
    means = {
        version: pl.read_parquet(runs.path("evaluations", f"{version:06d}", "advantages", "*.parquet", run=RUN))[
            "reward"
        ].mean()
        for version in (2, 4)
    }
    return max(means, key=lambda version: means[version])  # type: ignore[arg-type,return-value]


def images(runs: Runs, place: str, run: str = RUN) -> int:
    """Number of samples that have their image."""
    files = sorted(runs.path(place, "rollouts", run=run).glob("images-*.parquet"))
    return sum(pl.read_parquet(file).height for file in files)


def iteration(number: int) -> str:
    return f"iteration_{number:06d}"
