"""The update in the processes of several devices: the weights of one, every row once, failures that are reported."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
import torch

from configs.placement import PlacementSection
from configs.sections import LoraSection
from configs.training import ReferenceSection, UpdateSection
from grpo_core.errors import InputError, NonFiniteError
from grpo_core.rollouts.streams import Stream
from grpo_core.update.distributed import DistributedProcessGroup
from tasks.execution.errors import LostStageError, RemoteStageError
from tasks.execution.resources import run_resources
from tasks.progress import listen
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import ArtifactStore, current_store, described, use_store
from tasks.update.job import SharedJob, UpdateOutcome, refuse_unequal_sources, refuse_unusable_placement
from tasks.update.process import _require_success, take_part
from tests.processes import ProgressLog, in_processes
from tests.tasks.update.update_jobs import (
    ADVANTAGE_OF,
    IMAGES,
    JOINT,
    TEXTS,
    UPDATE,
    Modality,
    advantages_of,
    alone,
    changed,
    commit,
    committed,
    in_its_place,
    job_of,
    largest_difference,
    together,
    trained_advantages,
)

pytestmark = pytest.mark.usefixtures("ending_processes")
TWO = ("cpu", "cpu")
MEDIA = {"images": IMAGES, "texts": TEXTS}


@pytest.fixture
def ending_processes() -> Iterator[None]:
    with run_resources():
        yield


def of_both(update: UpdateSection) -> dict[Stream, UpdateSection]:
    """The update of each part; no weight changes the entropy of denoising steps."""
    return {"tokens": update, "denoising": update.model_copy(update={"entropy_coef": 0.0})}


REFRESHED = UPDATE.model_copy(update={"reference": ReferenceSection(refresh_every=1, mix=0.6), "ema": 0.9})
RECOMPUTED = {"gradient_checkpointing": True}
# A head that is tied to the embedding and one that is not; all weights and adapters; references of every kind.
UPDATES = {
    "images": (IMAGES, UPDATE),
    "texts": (TEXTS, UPDATE),
    "texts, refreshed reference": (TEXTS, REFRESHED),
    "texts, adapters": (changed(TEXTS, lora=LoraSection(rank=4, alpha=8.0), **RECOMPUTED), REFRESHED),
    "images, all weights": (changed(IMAGES, lora=None, **RECOMPUTED), UPDATE),
    "both parts": (changed(JOINT, **RECOMPUTED), of_both(UPDATE)),
    "both parts, all weights": (changed(JOINT, lora=None), of_both(UPDATE.model_copy(update={"ema": 0.9}))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sharding"),
    [*((name, "ddp") for name in ("images", "texts", "both parts")), *((name, "fsdp2") for name in UPDATES)],
)
def test_two_processes_compute_the_same(store: ArtifactStore, tmp_path: Path, name: str, sharding: str) -> None:
    modality, update = UPDATES[name]
    rollouts = modality.collect()
    advantages = trained_advantages(modality, rollouts)
    one = alone(job_of(modality, rollouts, advantages, update=update), tmp_path / "one")
    job = job_of(modality, rollouts, advantages, update=update, devices=TWO, sharding=sharding)
    two = together(job, tmp_path / "two")
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-6
    assert {path.name for path in (tmp_path / "one").iterdir()} == {path.name for path in (tmp_path / "two").iterdir()}
    assert (tmp_path / "two" / "tokens" / "reference").exists() == (update == REFRESHED)
    assert two.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-6)
    assert two.rows == one.rows


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "name"), [("ddp", "texts, refreshed reference"), ("fsdp2", "texts, adapters")])
def test_a_run_goes_on_with_other_processes(store: ArtifactStore, tmp_path: Path, sharding: str, name: str) -> None:
    modality, update = UPDATES[name]
    rollouts = modality.collect()
    advantages = advantages_of(rollouts)
    last: dict[str, Path] = {}
    for way in ("one", "changing"):
        kept = ArtifactStore(store.root, way)
        use_store(kept)
        policy: PolicyRef | None = None
        for version in (1, 2, 3):
            shared = {"devices": TWO, "sharding": sharding} if (way, version) == ("changing", 2) else {}
            job = job_of(modality, rollouts, advantages, policy=policy, update=update, **shared)
            folder = tmp_path / f"{way}-{version}"
            outcome = together(job, folder) if shared else alone(job, folder)
            policy = commit(kept, job, folder, outcome)
        last[way] = kept.local_files(policy.checkpoint)
    assert largest_difference(last["one"], last["changing"]) < 3e-6
    states = [(folder / "training_state.json").read_text() for folder in last.values()]
    assert all(json.loads(state)["optimizer_steps"] == {"tokens": 12} for state in states)
    assert all((folder / "tokens" / "reference").exists() for folder in last.values())


def make_two_versions(first: str, folder: Path) -> None:
    """In each process: an update, its commit and the next update."""
    log, shared = ProgressLog(), SharedJob.model_validate_json(first)
    listen(log)
    outcome = take_part(in_its_place(shared))
    made = None if outcome is None else commit(current_store(), shared.job, Path(shared.staged), outcome)
    policy = DistributedProcessGroup(torch.device("cpu")).from_first(made)
    (folder / "two").mkdir(exist_ok=True)
    job = shared.job.model_copy(update={"policy": policy})
    outcome = take_part(in_its_place(shared.model_copy(update={"job": job, "staged": str(folder / "two")})))
    loads = sum(line.startswith("loaded ") for line in log.lines)
    (folder / f"loads-{os.environ['RANK']}").write_text(str(loads))
    if outcome is not None:
        (folder / "policy.json").write_text(policy.model_dump_json())
        (folder / "outcome.json").write_text(outcome.model_dump_json())


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "loads"), [("ddp", "1"), ("fsdp2", "2")])
def test_the_next_update_is_that_of_new_processes(
    store: ArtifactStore, tmp_path: Path, sharding: str, loads: str
) -> None:
    """With a reference that every update refreshes, and a moving average."""
    modality, update = UPDATES["texts, adapters"]
    rollouts = modality.collect()
    job = job_of(modality, rollouts, advantages_of(rollouts), update=update, devices=TWO, sharding=sharding)
    (tmp_path / "one").mkdir()
    shared = SharedJob(job=job, storage=described(store), run=store.run, staged=str(tmp_path / "one"))
    in_processes(2, make_two_versions, shared.model_dump_json(), tmp_path)
    policy = PolicyRef.model_validate_json((tmp_path / "policy.json").read_text())
    new = together(job.model_copy(update={"policy": policy}), tmp_path / "new")
    assert UpdateOutcome.model_validate_json((tmp_path / "outcome.json").read_text()) == new
    assert [(tmp_path / f"loads-{rank}").read_text() for rank in range(2)] == [loads, loads]


@pytest.mark.parametrize(
    ("placement", "optimizer", "refused"),
    [
        ({"sharding": "fsdp2"}, "adamw", ("placement.sharding", "fsdp2")),
        ({"sharding": "fsdp2", "devices": TWO}, "adamw_8bit", ("update.optimizer", "adamw_8bit")),
        ({"devices": (0, 4096)}, "adamw", ("placement.devices", 4096)),
        ({"devices": ("cpu",) * 9}, "adamw", ("placement.devices", "9 times cpu")),
        ({"devices": ("cpu",) * 8}, "adamw", None),
        ({"devices": ("cpu",) * 8, "sharding": "fsdp2"}, "adamw", None),
    ],
)
def test_an_update_that_cannot_be_shared_is_refused(
    monkeypatch: pytest.MonkeyPatch, placement: dict[str, object], optimizer: str, refused: tuple[str, object] | None
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    section = PlacementSection(**{"devices": "cpu", **placement})
    updates: dict[Stream, UpdateSection] = {"tokens": UpdateSection(optimizer=optimizer)}
    if refused is None:
        refuse_unusable_placement(section, updates)
        return
    with pytest.raises(InputError) as caught:
        refuse_unusable_placement(section, updates)
    assert (caught.value.place, caught.value.value) == refused


def test_microbatches_of_unequal_passes_are_not_sharded() -> None:
    section = PlacementSection(devices=TWO, sharding="fsdp2")
    one, two = UpdateSection(micro_batch_size=1), UpdateSection(micro_batch_size=2)
    refuse_unusable_placement(section, {"tokens": two, "denoising": one})
    refused: list[dict[Stream, UpdateSection]] = [{"denoising": two}, {"tokens": two, "denoising": two}]
    for updates, place in zip(refused, ("update", "update.denoising"), strict=True):
        with pytest.raises(InputError) as caught:
            refuse_unusable_placement(section, updates)
        assert caught.value.place == f"{place}.micro_batch_size"
        refuse_unusable_placement(section.model_copy(update={"sharding": "ddp"}), updates)


def test_rows_whose_decoder_makes_unequal_passes_are_not_sharded() -> None:
    section = PlacementSection(devices=TWO, sharding="fsdp2")
    refuse_unequal_sources(section, ["tokens", "denoising"], [2, 2, 2])
    refuse_unequal_sources(section, ["tokens", "denoising"], [])
    refuse_unequal_sources(section, ["tokens"], [0, 1])
    refuse_unequal_sources(section.model_copy(update={"sharding": "ddp"}), ["denoising"], [0, 1])
    with pytest.raises(InputError, match="0 to 2") as caught:
        refuse_unequal_sources(section, ["denoising"], [1, 0, 2])
    assert caught.value.place == "placement.sharding"


@pytest.mark.parametrize(
    "first",
    [
        RemoteStageError("RuntimeError: Connection closed by peer", "", None),
        LostStageError("process 1 of 2 ended by SIGABRT\nwatchdog got stuck"),
    ],
)
def test_the_process_that_died_is_named_and_not_one_that_lost_it(first: Exception) -> None:
    answers = [Future[Any](), Future[Any]()]
    answers[0].set_exception(first)
    later = threading.Timer(0.1, answers[1].set_exception, [LostStageError("process 2 of 2 ended by SIGKILL")])
    later.start()
    with pytest.raises(LostStageError, match="process 2"):
        _require_success(answers, lambda: None)
    later.join()


# --- started as a run starts them: half a minute each, nearly all of it the imports of the processes


def update_processes(parent: psutil.Process) -> list[psutil.Process]:
    return [each for each in parent.children() if each.cmdline()[-2:] == ["tasks.execution.child_main", "device"]]


def run_task(
    modality: Modality,
    values: tuple[float | None, ...] = ADVANTAGE_OF,
    *,
    log: ProgressLog | None = None,
    update: UpdateSection = UPDATE,
    **placement: object,
) -> PolicyRef:
    rollouts = modality.collect()
    job = job_of(modality, rollouts, advantages_of(rollouts, values), update=update, **placement)
    listen(log or ProgressLog())
    return committed(job)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sharding"), [("images", "ddp"), ("texts", "fsdp2")])
def test_the_task_starts_its_processes(store: ArtifactStore, tmp_path: Path, name: str, sharding: str) -> None:
    modality, log = MEDIA[name], ProgressLog()
    two = run_task(modality, log=log, devices=TWO, sharding=sharding)
    # Only the first process's passes are told, two for every sample.
    assert (log.done[0], log.done[-1], log.done) == (0, len(ADVANTAGE_OF), sorted(log.done))
    drawn = modality.collect(two)
    kept = ArtifactStore(store.root, "alone")
    use_store(kept)
    one = run_task(modality)
    assert largest_difference(kept.local_files(one.checkpoint), store.local_files(two.checkpoint)) < 1e-6
    again = modality.collect(one)
    ours, theirs = (
        pl.read_parquet(place.local_files(reference) / "part-*.parquet")
        for place, reference in ((store, drawn), (kept, again))
    )
    assert set(ours["policy_digest"]) == {two.digest}
    assert ours["token_ids"].to_list() == theirs["token_ids"].to_list()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_its_sample_and_leaves_no_version(store: ArtifactStore) -> None:
    values = tuple(float("nan") if row == 4 else value for row, value in enumerate(ADVANTAGE_OF))
    with pytest.raises(NonFiniteError) as caught:
        run_task(TEXTS, values, devices=TWO)
    assert (caught.value.quantity, caught.value.sample_ids) == ("loss", ("g1.s00",))
    assert not Path(store.path("policies")).exists()
    assert not update_processes(psutil.Process())


SMALL_DEVICE = """
import torch


def bounded(inputs, settings):
    if len(inputs.advantages) > 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    return -inputs.advantages.unsqueeze(-1) * inputs.logprobs
"""


@pytest.mark.slow
def test_a_device_that_runs_out_of_memory_halves_the_batches_of_all(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(SMALL_DEVICE)
    update, log = UPDATE.model_copy(update={"loss": f"{tmp_path}/losses.py:bounded"}), ProgressLog()
    two = run_task(TEXTS, log=log, update=update.model_copy(update={"micro_batch_size": 2}), devices=TWO)
    kept = ArtifactStore(store.root, "alone")
    use_store(kept)
    one = run_task(TEXTS, update=update)
    assert [line for line in log.lines if "update.micro_batch_size 1 instead of 2" in line]
    assert largest_difference(kept.local_files(one.checkpoint), store.local_files(two.checkpoint)) < 1e-6


# Long enough that it is in the middle when something happens to it.
LONG = UPDATE.model_copy(update={"epochs": 500})


@pytest.mark.slow
def test_processes_are_kept_until_one_of_them_dies(tmp_path: Path) -> None:
    def version(name: str) -> str:
        use_store(ArtifactStore(str(tmp_path / "runs"), name))
        return run_task(TEXTS, devices=TWO).digest

    first = version("first")
    kept = update_processes(psutil.Process())
    assert len(kept) == 2
    assert version("again") == first
    assert update_processes(psutil.Process()) == kept
    kept[-1].kill()
    kept[-1].wait(10)
    assert version("anew") == first
    assert not set(update_processes(psutil.Process())) & set(kept)

    store, log = ArtifactStore(str(tmp_path / "runs"), "killed"), ProgressLog()
    use_store(store)
    log.then = lambda: update_processes(psutil.Process())[-1].kill()
    with pytest.raises(LostStageError, match="SIGKILL"):
        run_task(TEXTS, log=log, update=LONG, devices=TWO)
    assert store.find("policies/000001") is None
    assert not update_processes(psutil.Process())
    assert not [path for path in Path(store.path(".incoming")).iterdir() if path.is_dir()]


PROGRAM = """
import sys
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tests.processes import ProgressLog
from tests.tasks.update.test_process import LONG, TEXTS, TWO, run_task

use_store(ArtifactStore(sys.argv[1], "run"))
run_task(TEXTS, log=ProgressLog(lambda: print("running", flush=True)), update=LONG, devices=TWO)
"""


@pytest.mark.slow
def test_nothing_is_left_of_an_update_whose_own_process_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "running\n"
        started = psutil.Process(parent.pid).children(recursive=True)
        assert len(started) >= 2
        parent.kill()
    _, left = psutil.wait_procs(started, timeout=60)
    assert left == []
