"""Small training runs under one Prefect server for all tests of flows."""

import asyncio
import contextlib
import contextvars
import functools
import gc
import hashlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import pytest
from prefect.context import refresh_global_settings_context
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL

from configs.loader import read_config
from flows.server.prefect_settings import SERVER, SINGLE_RUN
from flows.server.temporary import TemporaryServer, keep_template
from flows.training.summary import TrainSummary
from grpo_core.errors import InputError
from tasks.metrics import is_measured
from tasks.progress import listen
from tasks.runs.layout import STATES

R = TypeVar("R")

REPOSITORY = Path(__file__).resolve().parents[2]


TINY = REPOSITORY / "configs" / "tiny.yaml"
TINY_SD3_NFT = REPOSITORY / "configs" / "tiny_sd3_nft.yaml"
TINY_TEXT = REPOSITORY / "configs" / "tiny_text.yaml"
TINY_BOTH = REPOSITORY / "configs" / "tiny_both.yaml"
SMALL = {
    "run.iterations": 2,
    # Tests start a run with other settings to see what is used again.
    "run.on_change": "restart",
    "policy.lora.rank": 4,
    "rollout.prompts_per_iteration": 2,
    "rollout.group_size": 2,
    "rollout.num_inference_steps": 1,
    "rollout.height": 32,
    "rollout.width": 32,
    "update.minibatch_size": 2,
    "rewards": [{"reward": "ssim", "weight": 0.5}, {"reward": "psnr", "weight": 0.5}],
    "evaluate.prompts": None,
    "evaluate.targets": None,
    "evaluate.target_column": None,
}
EVALUATED: dict[str, object] = {
    "evaluate__prompts": "data/prompts/shapes_heldout.jsonl",
    "evaluate__targets": "data/targets",
    "evaluate__target_column": "target",
    "evaluate__limit": 1,
    "evaluate__samples_per_prompt": 1,
    "evaluate__every": 2,
}
"""Changes for a run that is evaluated on one sample."""


SMALL_TEXT: dict[str, object] = {
    "run__iterations": 2,
    "rollout__prompts_per_iteration": 2,
    "rollout__group_size": 2,
    "update__minibatch_size": 4,
    "update__micro_batch_size": 4,
    "evaluate__limit": 3,
    "evaluate__samples_per_prompt": 2,
    "evaluate__every": 0,
}
"""Changes for a small run of texts."""


@dataclass(frozen=True)
class Start:
    """One start of a run: its summary, and the stages that ran, neighbours that score the same samples by name."""

    summary: TrainSummary
    stages: tuple[str, ...]


@dataclass
class Heard:
    """A listener that records which stages did any work, and every logged line."""

    stages: list[str]
    lines: list[str]

    def advance(self, stage: str, done: int, total: int) -> None:
        if done and stage not in self.stages:
            self.stages.append(stage)

    def log(self, line: str) -> None:
        self.lines.append(line)


def heard_of(body: Callable[[], R]) -> tuple[R, Heard]:
    """Call a function in a separate context: its result, and what it reported."""
    heard = Heard([], [])

    def listening() -> R:
        listen(heard)
        return body()

    return contextvars.copy_context().run(listening), heard


def refused(body: Callable[[], object]) -> tuple[InputError, ...]:
    """Return the input errors of a call that must be refused."""
    caught: pytest.ExceptionInfo[InputError]
    with pytest.raises(InputError) as caught:
        body()
    return caught.value.errors


def sha256_of(folder: Path, *without: str) -> dict[str, str]:
    """sha256 of every file of a folder, those below folders of these names left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not {*without} & set(path.parts))
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def flip(path: Path, chance: random.Random | None = None) -> None:
    """Change one bit of a file, in the middle or at a random place, and keep the file's times."""
    content, times = bytearray(path.read_bytes()), path.stat()
    place = chance.randrange(len(content)) if chance else len(content) // 2
    content[place] ^= 1 << chance.randrange(8) if chance else 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@contextlib.contextmanager
def training_process(
    runs: "Runs", folder: Path, *, environment: Mapping[str, str] | None = None, **changes: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `grpo train --json` of the run `run` on the current server, and kill it at the end of the context.

    The folder receives `out`, `err` and Prefect's `home`; an empty value of the environment removes a variable.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "flows.command_line.main", "train", str(TINY)]
    own = {"PREFECT_API_URL": str(PREFECT_API_URL.value() or ""), "PREFECT_HOME": str(folder / "home")}
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **own, **(environment or {})}
    variables = {name: value for name, value in variables.items() if value}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            [*command, *runs.sets("run", **changes), "--json"], env=variables, stdout=out, stderr=err
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def printed_summary(folder: Path) -> dict[str, Any]:
    """The last line that a training process printed."""
    summary: dict[str, Any] = json.loads((folder / "out").read_text().splitlines()[-1])
    return summary


def by_name(stages: Sequence[str]) -> tuple[str, ...]:
    """The stages in order, neighbours that score the same samples by name."""
    runs = itertools.groupby(stages, lambda stage: stage.partition(": score ")[0])
    return tuple(stage for _, side_by_side in runs for stage in sorted(side_by_side))


@dataclass(frozen=True)
class Runs:
    """Runs below one storage root."""

    root: Path

    def copied_to(self, root: Path) -> "Runs":
        """A copy of all of them, to be damaged or continued."""
        shutil.copytree(self.root, root)
        return Runs(root)

    def overrides(self, small: Mapping[str, object] = SMALL, /, **changes: object) -> list[str]:
        """The small configuration as `--set` arguments; `__` in a name stands for a dot."""
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        settings = {**small, "storage.root": str(self.root), **changed}
        return [f"{key}={json.dumps(value)}" for key, value in settings.items()]

    def sets(self, run: str = "run", **changes: object) -> list[str]:
        """The same as arguments of a command, with the run's name."""
        return [part for each in self.overrides(run__name=run, **changes) for part in ("--set", each)]

    def start(self, run: str = "run", **changes: object) -> Start:
        """Start or continue a training run in this process."""
        return self._train(TINY, self.overrides(run__name=run, **changes))

    def start_text(self, run: str = "text", *, file: Path = TINY_TEXT, **changes: object) -> Start:
        """The same with the shipped text configuration, or another one of texts."""
        return self._train(file, self.overrides({"run.on_change": "restart"}, run__name=run, **changes))

    def _train(self, file: Path, overrides: list[str]) -> Start:
        from flows.training.train import train

        summary, heard = heard_of(lambda: asyncio.run(train(read_config(file, overrides))))
        _freeze_imports()
        return Start(summary, by_name(heard.stages))

    def path(self, *parts: str, run: str = "run") -> Path:
        """A place in a run."""
        return self.root.joinpath(run, *parts)

    def reasons(self, run: str = "run") -> list[str]:
        """Why something was moved to `quarantine/`, in order."""
        notes = sorted(self.path("quarantine", run=run).glob("*/reason.json"))
        return [json.loads(note.read_text())["reason"] for note in notes]

    def metrics(self, iteration: int, run: str = "run") -> dict[str, float]:
        """The metrics of an iteration by name."""
        table = pl.read_parquet(self.path(f"iteration_{iteration:06d}", "metrics.parquet", run=run))
        return dict(zip(table["metric"], table["value"], strict=True))

    def steps(self, version: int, run: str = "run") -> pl.DataFrame:
        """The optimizer steps of the tokens' policy of a version."""
        return pl.read_parquet(self.path("policies", f"{version:06d}", "tokens", "update_steps.parquet", run=run))

    def policy_digest(self, version: int, run: str = "run") -> str:
        """The digest of a policy version, as its training state says it."""
        state = json.loads(self.path("policies", f"{version:06d}", "training_state.json", run=run).read_text())
        return str(state["policy_digest"])

    def tables(self, run: str = "run", *, but: str = "quarantine") -> dict[str, list[dict[str, Any]]]:
        """Every value of every table of a run but measured times, outside of quarantine and of folders named `but`.

        Of files with the states of denoising steps, the sha256.
        """
        top = self.path(run=run)
        kept = [path for path in sorted(top.rglob("*")) if not {"quarantine", but} & {*path.parts}]
        tables = {path: _unmeasured(pl.read_parquet(path)) for path in kept if path.suffix == ".parquet"}
        states = [path for path in kept if path.match(STATES)]
        tables |= {path: [{"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}] for path in states}
        return {path.relative_to(top).as_posix(): values for path, values in tables.items()}


Compare = Callable[[Runs, Start], None]
"""Compares a run that ended with the undisturbed one."""


@functools.cache
def _freeze_imports() -> None:
    """Keep what the first run has imported out of the full collection at the end of each run."""
    gc.collect()
    gc.freeze()


def _unmeasured(table: pl.DataFrame) -> list[dict[str, Any]]:
    if "metric" in table.columns:
        table = table.filter([not is_measured(name) for name in table["metric"]])
    return table.drop("seconds", strict=False).to_dicts()


def pytest_configure(config: pytest.Config) -> None:
    """Prefect's clients leave their connections to the collector, which may find them in any later test."""
    for kind in ("<socket", "event loop", "transport"):
        config.addinivalue_line("filterwarnings", f"ignore:unclosed {kind}:ResourceWarning")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server of this process, as that of a single run unless the session has a test that reads events.

    The first of a release of Prefect keeps its migrated database in pytest's cache for those of later sessions.
    """
    stored = any("stored_events" in getattr(item, "fixturenames", ()) for item in request.session.items)
    cache = getattr(request.config, "cache", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache.mkdir("server") if cache else tmp_path_factory.getbasetemp()))
        running = TemporaryServer(SERVER if stored else {**SERVER, **SINGLE_RUN})
        running.wait_until_ready(120.0)
        keep_template(running.folder)
    # Threads have the global settings, which Prefect reads from the environment; programs that tests start do not.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_URL", running.api_url)
        refresh_global_settings_context()
    yield
    # At its exit the process would wait for a server that is gone to take what has not been sent.
    for worker in (APILogWorker, EventsWorker):
        worker.drain_all()
    refresh_global_settings_context()
    running.close()
    running.process.wait()
    # What the clients left is collected here, where it is no failure; at the very end of pytest it would be one.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def stored_events(server: None) -> None:
    """Of a test that reads events, so that the server stores them."""


@pytest.fixture(scope="session")
def undisturbed(server: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Start]:
    """A finished run that no test changes."""
    runs = Runs(tmp_path_factory.mktemp("undisturbed"))
    return runs, runs.start()


@pytest.fixture(scope="session")
def evaluated_text(server: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Start]:
    """A finished run of texts, of two updates, evaluated before and after; no test changes it."""
    runs = Runs(tmp_path_factory.mktemp("evaluated-text"))
    return runs, runs.start_text(**SMALL_TEXT)


@pytest.fixture
def finished(undisturbed: tuple[Runs, Start], tmp_path: Path) -> Runs:
    """A copy of the finished run, to be damaged or continued."""
    return undisturbed[0].copied_to(tmp_path / "runs")


@pytest.fixture
def empty(server: None, tmp_path: Path) -> Runs:
    """A storage root without runs."""
    return Runs(tmp_path / "runs")


@pytest.fixture
def final(undisturbed: tuple[Runs, Start]) -> Compare:
    """Compare a run that ended with the undisturbed one: the policy to the bit, and every value of every table."""
    golden, first = undisturbed

    def compare(runs: Runs, start: Start) -> None:
        assert start.summary.policy_digest == first.summary.policy_digest
        assert runs.tables() == golden.tables()

    return compare


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 8 MiB."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small disk needs root ({error})")
    yield folder
    # Lazily: the traceback of a failed flow may keep a file open.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
