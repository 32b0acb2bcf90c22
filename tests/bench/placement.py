"""One run on this machine twice: in one process, and on two pools of three workers over PostgreSQL and S3.

`make bench-pools`. Both make the same policy; what a stage takes beyond its own work is what dispatching it costs.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from tasks.execution.work_pool import WORKER_LABEL
from tasks.process import CHECKOUT
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.server.grpo_ui import grpo_ui
from tests.servers import postgres_server, s3_server

CONFIG = "configs/tiny.yaml"
POOLS = ("images", "images", "scores")
PLACED = (
    "placement.rollouts.pool=images",
    "placement.rollouts.shards=2",
    "placement.rewards.pool=scores",
    "placement.advantages.pool=scores",
    "placement.update.pool=images",
)
PLACES = {
    "collect rollouts": "iteration_{iteration:06d}/rollouts",
    "score ssim": "iteration_{iteration:06d}/rewards/ssim",
    "score psnr": "iteration_{iteration:06d}/rewards/psnr",
    "compute advantages": "iteration_{iteration:06d}/advantages",
    "update policy": "policies/{iteration:06d}",
}
SECONDS_TO_START = 300.0


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        summary: its summary.
        wall: seconds from the start of the command to its end.
    """

    summary: Mapping[str, Any]
    wall: float


def program(*arguments: str) -> list[str]:
    """The command line of the project."""
    return [sys.executable, "-m", "flows.command_line.main", *arguments]


@contextlib.contextmanager
def working(folder: Path, environment: Mapping[str, str]) -> Iterator[list[Path]]:
    """Start the workers; yield their logs."""
    logs, processes = [], []
    try:
        for number, pool in enumerate(POOLS):
            logs.append(folder / f"worker-{number}.log")
            with logs[-1].open("wb") as log:
                command = program("worker", pool)
                processes.append(subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=log))
        for log_file, process in zip(logs, processes, strict=True):
            limit = time.monotonic() + SECONDS_TO_START
            while "started!" not in log_file.read_text():
                assert process.poll() is None, log_file.read_text()
                assert time.monotonic() < limit, log_file.read_text()
                time.sleep(0.2)
        yield logs
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def train(name: str, environment: Mapping[str, str], overrides: Sequence[str]) -> Measured:
    """One run to its end."""
    begun = time.monotonic()
    arguments = [part for each in overrides for part in ("--set", each)]
    ended = subprocess.run(
        program("train", CONFIG, "--run", name, *arguments, "--json"),
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return Measured(json.loads(ended.stdout.splitlines()[-1]), time.monotonic() - begun)


@dataclass(frozen=True)
class Dispatched:
    """What a task of a stage took beyond the stage's own work.

    Attributes:
        overhead: seconds of asking for it, taking it up, and hearing what came of it.
        queued: seconds that it waited while its worker was at other stages.
    """

    overhead: float
    queued: float


def overheads(url: str, name: str, store: ArtifactStore, iterations: int) -> dict[str, list[Dispatched]]:
    """By stage, what its tasks took beyond the stage's own work; the first iteration warms up."""
    tagged = {"flow_runs": {"tags": {"all_": [name]}}}
    sent = [each for each in _found(url, "flow_runs", tagged) if each["parent_task_run_id"]]
    found: dict[str, list[Dispatched]] = {}
    for iteration in range(2, iterations + 1):
        for stage, folder in PLACES.items():
            made = store.find(folder.format(iteration=iteration))
            assert made is not None, folder
            title = f"iteration {iteration}: {stage}"
            requested = {"task_runs": {"name": {"any_": [title]}}, "flow_runs": {"name": {"any_": [name]}}}
            (task,) = _found(url, "task_runs", requested)
            # Those of shards have a part of their own in the name.
            first, last = f"iteration {iteration}", f": {stage} on "
            of_stage = [each for each in sent if re.match(f"{first}[:,]", each["name"]) and last in each["name"]]
            queued = max(queued_seconds(each, sent) for each in of_stage)
            beyond = task["total_run_time"] - made.seconds - queued
            found.setdefault(stage, []).append(Dispatched(beyond, queued))
    return found


def queued_seconds(flow_run: Mapping[str, Any], sent: Sequence[Mapping[str, Any]]) -> float:
    """Seconds from when a flow run was asked for until its worker was done with those that it took before."""
    before = [
        _moment(each["end_time"])
        for each in sent
        if each["labels"][WORKER_LABEL] == flow_run["labels"][WORKER_LABEL]
        and each["start_time"] < flow_run["start_time"]
    ]
    return max([0.0, *(ended - _moment(flow_run["created"]) for ended in before)])


def _found(url: str, kind: str, requested: Mapping[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(f"{url}/{kind}/filter", json={**requested, "limit": 200}, timeout=60)
    found: list[dict[str, Any]] = answer.raise_for_status().json()
    return found


def _moment(written: str) -> float:
    return datetime.fromisoformat(written).timestamp()


def main(iterations: int) -> None:
    """Measure, and print the table."""
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as scratch, postgres_server() as postgres:
        folder = Path(scratch)
        postgres.sql("CREATE DATABASE prefect")
        common = [f"run.iterations={iterations}", "evaluate.every=0", "rollout.prompts_per_batch=6"]
        database = {"PREFECT_API_DATABASE_CONNECTION_URL": postgres.url("prefect")}
        with s3_server(folder) as bucket, grpo_ui(folder / "server-home", database) as ui:
            url = ui.api_url
            away = {**os.environ, **bucket.environment, "PREFECT_API_URL": url, "PREFECT_HOME": str(folder / "home")}
            away["XDG_CACHE_HOME"] = str(folder / "cache")
            here = {**os.environ, "PREFECT_API_URL": url, "PREFECT_HOME": str(folder / "home")}
            alone = train("alone", here, [*common, f"storage.root={folder}/runs"])
            with working(folder, away) as logs:
                root = f"s3://{bucket.make_bucket()}/runs"
                pooled = train("pooled", away, [*common, *PLACED, f"storage.root={root}"])
                loads = [log.read_text().count("loaded data/models") for log in logs]
            os.environ.update(bucket.environment)
            beyond = overheads(url, "pooled", ArtifactStore(root, "pooled"), iterations)
        show(alone, pooled, loads, beyond)


def show(alone: Measured, pooled: Measured, loads: Sequence[int], beyond: Mapping[str, Sequence[Dispatched]]) -> None:
    """Print the metrics side by side."""
    table = Table("", "one process, local disk", "two pools, three workers, PostgreSQL, S3")
    table.add_row("policy digest", *(str(each.summary["policy_digest"])[:16] for each in (alone, pooled)))
    table.add_row("seconds, command", f"{alone.wall:.1f}", f"{pooled.wall:.1f}")
    for each in ("total", "rollouts", "rewards", "advantages", "update"):
        seconds = [run.summary["seconds"] for run in (alone, pooled)]
        table.add_row(f"seconds, {each}", *(f"{value[each]:.1f}" for value in seconds if isinstance(value, dict)))
    console = Console()
    console.print(table)
    console.print(f"model loads by worker: {list(loads)}")
    for stage, several in beyond.items():
        seconds = [each.overhead for each in several]
        overhead = f"median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
        queued = statistics.median(each.queued for each in several)
        console.print(f"{stage}: {overhead} beyond its own work, {len(several)} times; queued {queued:.2f} s before")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=5)
    main(parser.parse_args().iterations)
