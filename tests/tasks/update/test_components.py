"""A policy with two components: each trained on its own rows, stored apart, and committed together or not at all."""

import hashlib
import json
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from configs.placement import PlacementSection
from configs.sections import LoraSection
from configs.training import (
    ALGORITHMS,
    AnyUpdateSection,
    DenoisingUpdateSection,
    MismatchSection,
    ReferenceSection,
    UpdateSection,
)
from grpo_core.errors import InputError
from grpo_core.parity import ParityError
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.denoising.component import DenoisingComponent
from grpo_core.policies.glm_image.decoding import GlmImageDecoder
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.records import ActionLogprobs
from grpo_core.rollouts.streams import STREAMS, Stream
from grpo_core.update.process_group import SINGLE_PROCESS
from tasks.execution.resources import resource, run_resources
from tasks.models.initial import OPTIMIZER_FILE, weights_digest
from tasks.models.resident import ResidentPolicy
from tasks.storage.artifacts.commit import STATES_REMOVED, commit_artifact, delete_files
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tasks.update import process
from tasks.update.component import ComponentUpdate, carry_out
from tasks.update.job import UpdateJob, UpdateOutcome
from tests.tasks.reports.made_runs import flip_last_byte
from tests.tasks.update.update_jobs import (
    JOINT,
    TEXTS,
    UPDATE,
    advantages_of,
    alone,
    changed,
    commit,
    committed,
    job_of,
    trained_advantages,
    weights_and_moments,
)

ADAPTER = "adapter_model.safetensors"
DENOISING = DenoisingUpdateSection(
    learning_rate=1e-3, micro_batch_size=6, mismatch=MismatchSection(mode="truncate"), kl_coef=0.01, ema=0.5
)
UPDATES: Mapping[Stream, UpdateSection] = {
    "tokens": UPDATE.model_copy(
        update={"epochs": 1, "micro_batch_size": 4, "reference": ReferenceSection(refresh_every=1, mix=0.6)}
    ),
    "denoising": DENOISING,
}


@dataclass(frozen=True)
class Updated:
    """An update of both components, in a process that begins with it.

    Attributes:
        root: of the runs, with the rollouts and advantages of the job.
        folder: of the new version.
        progress: the reported numbers of finished and of all passes.
    """

    job: UpdateJob
    root: Path
    outcome: UpdateOutcome
    folder: Path
    progress: Sequence[tuple[int, int]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Updated:
    root, progress = tmp_path_factory.mktemp("both"), list[tuple[int, int]]()
    use_store(ArtifactStore(str(root / "runs"), "run"))
    (folder := root / "version").mkdir()
    with run_resources():
        rollouts = JOINT.collect()
        job = job_of(JOINT, rollouts, trained_advantages(JOINT, rollouts), update=UPDATES)
        outcome = carry_out(job, folder, SINGLE_PROCESS, lambda done, total: progress.append((done, total)))
    return Updated(job, root / "runs", outcome, folder, progress)


@pytest.fixture
def store(both: Updated, tmp_path: Path) -> ArtifactStore:
    shutil.copytree(both.root, tmp_path / "runs")
    store = ArtifactStore(str(tmp_path / "runs"), "run")
    use_store(store)
    return store


def version(store: ArtifactStore, both: Updated, tmp_path: Path) -> PolicyRef:
    return commit(store, both.job, shutil.copytree(both.folder, tmp_path / "first"), both.outcome)


def test_each_component_learns_from_its_rows_and_is_stored_apart(both: Updated) -> None:
    outcome, made = both.outcome, both.folder
    # Four drafts and two more renderings of the first one, for each prompt.
    assert outcome.rows == 12
    assert outcome.metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert outcome.metrics["denoising/sampling/sampling_logp_difference/max"] <= 1e-5
    state = json.loads((made / "training_state.json").read_text())
    # Eight drafts in minibatches of four; six renderings at once.
    assert state["optimizer_steps"] == {"tokens": 2, "denoising": 1}
    assert state["policy_digest"] == outcome.policy.digest == weights_digest(made)
    for stream, steps in (("tokens", 2), ("denoising", 1)):
        folder = made / stream
        assert pl.read_parquet(folder / "update_steps.parquet")["optimizer_step"].to_list() == list(range(1, steps + 1))
        names = list(load_file(folder / ADAPTER))
        assert names
        assert all(("language_model" in name) == (stream == "tokens") for name in names)
        assert all(value.abs().max() > 0 for name, value in load_file(folder / ADAPTER).items() if "lora_B" in name)
    shares = [done / total for done, total in both.progress]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert 0.5 in shares


@pytest.mark.parametrize("stream", STREAMS)
def test_a_component_is_trained_as_alone(stream: Stream, both: Updated, store: ArtifactStore, tmp_path: Path) -> None:
    """No update sees the other's rows, settings or weights."""
    single = changed(JOINT, train=(stream,))
    (rollouts,) = both.job.rollouts
    job = job_of(single, rollouts, trained_advantages(single, rollouts), update={stream: UPDATES[stream]})
    assert alone(job, tmp_path / "one").rows == {"tokens": 8, "denoising": 6}[stream]
    state = json.loads((tmp_path / "one" / "training_state.json").read_text())
    assert state["optimizer_steps"] == {stream: {"tokens": 2, "denoising": 1}[stream]}
    ours, theirs = load_file(both.folder / stream / ADAPTER), load_file(tmp_path / "one" / stream / ADAPTER)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert ours.keys() == theirs.keys()


def test_steps_are_taken_one_by_one_where_the_window_does_not_fit(
    both: Updated, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before microbatches are halved; to rounding with the same weights."""
    single = changed(JOINT, train=("denoising",))
    (rollouts,) = both.job.rollouts
    job = job_of(single, rollouts, trained_advantages(single, rollouts), update={"denoising": UPDATES["denoising"]})
    logprobs, taken = DenoisingComponent.logprobs, list[tuple[int, int]]()

    def bounded(self: DenoisingComponent, actions: DenoisingBatch, **options: Any) -> ActionLogprobs:
        if torch.is_grad_enabled():
            taken.append((len(actions), actions.loss_mask.shape[1]))
            if taken[-1][1] > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return logprobs(self, actions, **options)

    monkeypatch.setattr(DenoisingComponent, "logprobs", bounded)
    made = store.local_files(committed(job).checkpoint)
    assert taken[:3] == [(taken[0][0], 2), (taken[0][0], 1), (taken[0][0], 1)]
    ours, theirs = (load_file(each / "denoising" / ADAPTER) for each in (made, both.folder))
    assert max(float((ours[name] - value).abs().max()) for name, value in theirs.items()) < 1e-6


@pytest.mark.parametrize(("offload", "one_by_one"), [("none", True), ("components", False)])
def test_whether_steps_are_taken_one_by_one_follows_the_estimate(
    monkeypatch: pytest.MonkeyPatch, offload: Any, one_by_one: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80))
    spec = changed(JOINT, offload=offload).spec().model_copy(update={"memory": 70, "of_window": (90, 60)})
    assert spec.steps_one_by_one(torch.device("cuda")) == one_by_one
    assert not spec.steps_one_by_one(torch.device("cpu"))


class Looking:
    """A single process that looks at the weights with which it would be compared with others."""

    def __init__(self) -> None:
        self.finite: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(SINGLE_PROCESS, name)

    def distribute(self, trained: TrainedModel) -> None:
        self.finite += [bool(each.isfinite().all()) for each in trained.model.parameters()]


def test_processes_compare_weights_that_are_there(both: Updated, store: ArtifactStore, tmp_path: Path) -> None:
    """In place of those that are off the device stand numbers that are not finite, which are equal to any."""
    single = changed(JOINT, train=("denoising",), offload="components")
    (rollouts,) = both.job.rollouts
    updates: dict[Stream, AnyUpdateSection] = {"denoising": DENOISING}
    job = job_of(single, rollouts, trained_advantages(single, rollouts), update=updates)
    (folder := tmp_path / "version").mkdir()
    group: Any = Looking()
    with run_resources():
        carry_out(job, folder, group, None)
    assert len(group.finite) > 10
    assert all(group.finite)


def test_an_update_goes_on_from_what_is_stored(both: Updated, store: ArtifactStore, tmp_path: Path) -> None:
    """Weights, moments, steps, references and averages of both, in a process that made the first and in a new one."""
    with run_resources():
        policy = commit(store, both.job, tmp_path / "first", alone(both.job, tmp_path / "first"))
        job = both.job.model_copy(update={"policy": policy})
        second = alone(job, tmp_path / "second")
    with run_resources():
        assert alone(job, tmp_path / "again") == second
    ours, theirs = (weights_and_moments(tmp_path / name) for name in ("second", "again"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert json.loads((tmp_path / "second" / "training_state.json").read_text())["optimizer_steps"] == {
        "tokens": 4,
        "denoising": 2,
    }
    # The reference of the tokens alone was refreshed, and the decoder alone has an average.
    folder = tmp_path / "second"
    copies = {stream: [path.name for path in (folder / stream).iterdir() if path.is_dir()] for stream in STREAMS}
    assert copies == {"tokens": ["reference"], "denoising": ["ema"]}
    was = load_file(Path(store.path("policies/000001")) / "denoising" / "ema" / ADAPTER)
    new, average = (load_file(place / ADAPTER) for place in (folder / "denoising", folder / "denoising" / "ema"))
    assert all(torch.equal(value, 0.5 * new[name] + 0.5 * was[name]) for name, value in average.items())


def test_no_stage_reads_what_only_another_needs(
    both: Updated, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = version(store, both, tmp_path)
    names, real = list[str](), hashlib.file_digest

    def noted(stream: Any, algorithm: str) -> Any:
        names.append(Path(stream.name).name)
        return real(stream, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    store = ArtifactStore(store.root, store.run)
    use_store(store)
    resource(ResidentPolicy).at(policy, JOINT.spec(), JOINT.rollout, PlacementSection(devices="cpu"))
    assert ADAPTER in names
    assert OPTIMIZER_FILE not in names
    names.clear()
    process._verify(both.job.model_copy(update={"policy": policy}), store)
    assert names.count(OPTIMIZER_FILE) == 2
    # Rows, advantages and states; no images.
    assert sorted(Path(name).suffix for name in names if name.startswith("part-")) == [
        ".parquet",
        ".parquet",
        ".safetensors",
    ]
    assert not [name for name in names if name.startswith("images-")]


def test_the_averaged_policy_is_loaded_by_component(both: Updated, store: ArtifactStore, tmp_path: Path) -> None:
    policy = version(store, both, tmp_path)
    loaded = resource(ResidentPolicy).at(policy.averaged, JOINT.spec(), JOINT.rollout, PlacementSection(devices="cpu"))
    stored = Path(store.path("policies/000001"))
    for stream, folder in (("tokens", stored / "tokens"), ("denoising", stored / "denoising" / "ema")):
        saved = tmp_path / stream
        saved.mkdir()
        loaded.components[stream].save_weights(saved)
        assert (saved / ADAPTER).read_bytes() == (folder / ADAPTER).read_bytes()


def disturbed(stored: ArtifactRef, column: str, store: ArtifactStore) -> ArtifactRef:
    """The rollouts with other log-probs in a column, committed in their place."""
    table = pl.read_parquet(sorted(store.local_files(stored).glob("part-*.parquet")))
    with store.staging() as staged:
        shutil.copytree(store.local_files(stored), staged, dirs_exist_ok=True)
        (written,) = staged.glob("part-*.parquet")
        table.with_columns(pl.col(column).list.eval(pl.element() + 0.01)).write_parquet(written)
        return commit_artifact(
            store,
            staged,
            f"{stored.folder}-disturbed",
            digest="disturbed",
            schema_version=stored.schema_version,
            rows=stored.rows,
            seconds=0.0,
            metrics={},
        )


@pytest.mark.parametrize(
    ("column", "stream"),
    [
        pytest.param("rollout_logprobs", "tokens", marks=pytest.mark.slow),
        # Which is trained after the other.
        ("denoising_logprobs", "denoising"),
    ],
)
def test_either_gate_stops_a_version(
    column: str, stream: Stream, both: Updated, store: ArtifactStore, tmp_path: Path
) -> None:
    """The next use of the policy in memory loads the weights of the version that it asks for."""
    job = both.job
    rollouts = disturbed(job.rollouts[0], column, store)
    with pytest.raises(ParityError):
        alone(job.model_copy(update={"rollouts": (rollouts,)}), tmp_path / "refused")
    assert not (tmp_path / "refused" / "training_state.json").exists()
    policy = resource(ResidentPolicy).at(job.policy, job.model, JOINT.rollout, PlacementSection(devices="cpu"))
    for component in policy.components.values():
        started = {name: value.detach() for name, value in component.trainable_parameters().items()}
        assert all(not value.any() for name, value in started.items() if "lora_B" in name)
    assert alone(job, tmp_path / "after").policy == both.outcome.policy


@pytest.mark.parametrize("denoising", [DENOISING, *(each() for each in ALGORITHMS["denoising"].values())])
def test_a_job_arrives_in_another_process_as_it_is(both: Updated, denoising: AnyUpdateSection) -> None:
    adapted = changed(JOINT, lora=LoraSection(modules_to_save=("proj_out", "lm_head")))
    updates = {**UPDATES, "denoising": denoising}
    job = job_of(adapted, *both.job.rollouts, both.job.advantages, update=updates)
    arrived = UpdateJob.model_validate_json(job.model_dump_json())
    assert arrived.model == job.model
    assert [each.model_dump() for each in arrived.updates.values()] == [each.model_dump() for each in updates.values()]


@pytest.mark.parametrize("change", [flip_last_byte, Path.unlink], ids=["a flipped byte", "a missing file"])
@pytest.mark.parametrize("stream", STREAMS)
def test_a_digest_covers_the_weights_of_both(stream: Stream, change: Callable[[Path], None], tmp_path: Path) -> None:
    for each in STREAMS:
        (tmp_path / each).mkdir()
        (tmp_path / each / ADAPTER).write_bytes(b"weights")
    before = weights_digest(tmp_path)
    change(tmp_path / stream / ADAPTER)
    assert weights_digest(tmp_path) != before


class KilledError(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def test_a_kill_in_between_leaves_no_version(
    both: Updated, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the first component were written; the next start makes the version that an undisturbed one makes."""
    job, outcome = both.job, both.outcome

    def killed(self: GlmImageDecoder, folder: Path) -> None:
        assert (folder.parent / "tokens" / ADAPTER).is_file()
        raise KilledError

    with run_resources(), monkeypatch.context() as patched:
        patched.setattr(GlmImageDecoder, "save_weights", killed)
        with pytest.raises(KilledError):
            committed(job)
        assert store.find("policies/000001") is None
        patched.undo()
        again = committed(job)
    assert (again.digest, again.checkpoint.digest) == (outcome.policy.digest, outcome.checkpoint_digest)
    # A version that is damaged after the states were pruned cannot be made again.
    store.clear_place("policies/000001", reason="a bit fell")
    delete_files(store, job.rollouts[0], ["states/part-00000-00000.safetensors"], pruned={"removed": STATES_REMOVED})
    with pytest.raises(InputError) as caught:
        committed(job)
    assert (caught.value.place, caught.value.value) == ("run/policies/000001", "damaged")
    assert "a bit fell" in caught.value.hint


# Nothing but the optimizer has to be read: no reference of a KL, no moving average.
SETTINGS = UPDATE.model_copy(update={"kl_coef": 0.0, "epochs": 1, "micro_batch_size": 4})


def test_the_optimizer_in_memory_is_the_stored(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rollouts = TEXTS.collect()
    advantages = advantages_of(rollouts)

    def after(policy: PolicyRef | None, learning_rate: float = SETTINGS.learning_rate) -> UpdateJob:
        update = SETTINGS.model_copy(update={"learning_rate": learning_rate})
        return job_of(TEXTS, rollouts, advantages, policy=policy, update=update)

    stored = Path(store.path("policies/000001/tokens")) / OPTIMIZER_FILE
    with run_resources():
        first = committed(after(None))
        content = stored.read_bytes()
        stored.unlink()
        second = committed(after(first))
    stored.write_bytes(content)
    with run_resources():
        read = alone(after(first), tmp_path / "read")
        assert (read.policy.digest, read.checkpoint_digest) == (second.digest, second.checkpoint.digest)
        # A failed update has changed the optimizer in memory.
        with monkeypatch.context() as patched:
            patched.setattr(CausalLMPolicy, "save_weights", _refuse)
            with pytest.raises(OSError, match="full"):
                committed(after(second))
        third = committed(after(second))
    with run_resources():
        assert alone(after(second), tmp_path / "again").policy.digest == third.digest
        # Other settings need another optimizer, which continues from the files.
        Path(store.path("policies/000003/tokens"), OPTIMIZER_FILE).unlink()
        with pytest.raises(StaleReferenceError, match=OPTIMIZER_FILE):
            committed(after(third, learning_rate=1e-5))


def test_the_first_optimizer_is_gone_when_the_second_component_begins(
    both: Updated, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU its moments would take the second's memory; in CPU memory they are kept for the next update."""
    run, made, alive = ComponentUpdate.run, list[Any](), list[list[bool]]()

    def watched(self: ComponentUpdate, *given: Any) -> Any:
        alive.append([each() is not None for each in made])
        found = run(self, *given)
        made.append(weakref.ref(found[1]))
        return found

    monkeypatch.setattr(ComponentUpdate, "run", watched)
    monkeypatch.setattr(ResidentPolicy, "keeps_optimizers", lambda *_: False)
    (folder := tmp_path / "version").mkdir()
    with run_resources():
        assert carry_out(both.job, folder, SINGLE_PROCESS, None) == both.outcome
    assert alive == [[], [False]]


def _refuse(self: CausalLMPolicy, folder: Path) -> None:
    raise OSError("the disk is full")
