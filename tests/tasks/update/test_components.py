"""A policy with two components: each trained on its own rows, stored apart, and committed together or not at all."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from configs.sections import LoraSection, PlacementSection
from configs.training import DenoisingUpdateSection, MismatchSection, ReferenceSection, UpdateSection
from grpo_core.errors import InputError
from grpo_core.parity import ParityError
from grpo_core.policies.glm_image.decoder import GlmImageDecoder
from grpo_core.streams import STREAMS, Stream
from grpo_core.update import SINGLE_PROCESS
from tasks.execution.resources import resource, run_resources
from tasks.models.files import EMA_FOLDER, REFERENCE_FOLDER, weights_digest
from tasks.models.resident import ResidentPolicy
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.artifacts.tombstones import STATES_REMOVED, replace_artifact
from tasks.update.job import UpdateJob, carry_out
from tasks.update.update_policy import update_policy_task
from tests.tasks.update.update_jobs import (
    JOINT,
    TEXTS,
    UPDATE,
    Modality,
    advantages_of,
    alone,
    changed,
    commit,
    job_of,
    trained_advantages,
    weights_and_moments,
)

ADAPTER = "adapter_model.safetensors"
DENOISING = DenoisingUpdateSection(
    learning_rate=1e-3, minibatch_size=3, micro_batch_size=1, mismatch=MismatchSection(mode="truncate"), kl_coef=0.01
)
UPDATES: Mapping[Stream, UpdateSection] = {"tokens": UPDATE, "denoising": DENOISING}
DECODER = changed(JOINT, train=("decoder",))


def with_settings(stream: Stream, **settings: object) -> Mapping[Stream, UpdateSection]:
    """The updates with changes of one of them."""
    return {**UPDATES, stream: UPDATES[stream].model_copy(update=settings)}


def joint_job(
    updates: Mapping[Stream, UpdateSection], policy: PolicyRef | None = None, modality: Modality = JOINT
) -> UpdateJob:
    rollouts = modality.collect(policy)
    return job_of(modality, rollouts, trained_advantages(modality, rollouts), policy=policy, update=updates)


def version(store: ArtifactStore, job: UpdateJob, folder: Path) -> PolicyRef:
    return commit(store, job, folder, alone(job, folder))


def test_each_component_learns_from_its_rows_and_is_stored_apart(store: ArtifactStore, tmp_path: Path) -> None:
    job = joint_job(UPDATES)
    outcome = alone(job, tmp_path / "both")
    # Four drafts and two more renderings of the first one, for each prompt.
    assert outcome.rows == 12
    assert outcome.metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert outcome.metrics["denoising/sampling/sampling_logp_difference/max"] <= 1e-5
    state = json.loads((tmp_path / "both" / "training_state.json").read_text())
    # Eight drafts in minibatches of four, twice; six renderings in minibatches of three, once.
    assert state["optimizer_steps"] == {"tokens": 4, "denoising": 2}
    assert state["policy_digest"] == outcome.digest == weights_digest(tmp_path / "both")
    for stream, steps in (("tokens", 4), ("denoising", 2)):
        folder = tmp_path / "both" / stream
        assert pl.read_parquet(folder / "update_steps.parquet")["optimizer_step"].to_list() == list(range(1, steps + 1))
        names = list(load_file(folder / ADAPTER))
        assert names
        assert all(("language_model" in name) == (stream == "tokens") for name in names)
        assert all(value.abs().max() > 0 for name, value in load_file(folder / ADAPTER).items() if "lora_B" in name)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_component_is_trained_as_in_a_run_of_its_own(stream: Stream, store: ArtifactStore, tmp_path: Path) -> None:
    """No update sees the other's rows, settings or weights."""
    alone(joint_job(UPDATES), tmp_path / "both")
    single = changed(JOINT, train=({"tokens": "tokens", "denoising": "decoder"}[stream],))
    rollouts = JOINT.collect()
    job = job_of(single, rollouts, trained_advantages(single, rollouts), update={stream: UPDATES[stream]})
    alone(job, tmp_path / "one")
    ours, theirs = load_file(tmp_path / "both" / stream / ADAPTER), load_file(tmp_path / "one" / ADAPTER)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert ours.keys() == theirs.keys()


def test_an_update_goes_on_from_what_is_stored(store: ArtifactStore, tmp_path: Path) -> None:
    """Weights, moments, steps, references and averages of both, in this process and in one that begins with them."""
    updates = {
        "tokens": UPDATES["tokens"].model_copy(update={"reference": ReferenceSection(refresh_every=1, mix=0.6)}),
        "denoising": UPDATES["denoising"].model_copy(update={"ema": 0.5, "minibatch_size": None}),
    }
    with run_resources():
        policy = version(store, joint_job(updates), tmp_path / "first")
        job = joint_job(updates, policy)
        second = alone(job, tmp_path / "second")
    with run_resources():
        assert alone(job, tmp_path / "again") == second
    ours, theirs = (weights_and_moments(tmp_path / name) for name in ("second", "again"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert json.loads((tmp_path / "second" / "training_state.json").read_text())["optimizer_steps"] == {
        "tokens": 8,
        "denoising": 2,
    }
    # The reference of the tokens alone was refreshed; the averaged policy is complete.
    assert [path.name for path in (tmp_path / "second" / REFERENCE_FOLDER).iterdir()] == ["tokens"]
    folder = tmp_path / "second"
    was = load_file(Path(store.path("policies/000001")) / EMA_FOLDER / "denoising" / ADAPTER)
    new, average = (load_file(place / "denoising" / ADAPTER) for place in (folder, folder / EMA_FOLDER))
    assert all(torch.equal(value, 0.5 * new[name] + 0.5 * was[name]) for name, value in average.items())
    assert (folder / EMA_FOLDER / "tokens" / ADAPTER).read_bytes() == (folder / "tokens" / ADAPTER).read_bytes()


def test_the_averaged_policy_is_loaded_by_component(store: ArtifactStore, tmp_path: Path) -> None:
    policy = version(store, joint_job(with_settings("denoising", ema=0.5)), tmp_path / "first")
    loaded = resource(ResidentPolicy).at(policy.averaged, JOINT.spec(), JOINT.rollout, PlacementSection(device="cpu"))
    stored = Path(store.path("policies/000001"))
    for stream, folder in (("tokens", stored / "tokens"), ("denoising", stored / EMA_FOLDER / "denoising")):
        saved = tmp_path / stream
        saved.mkdir()
        loaded.components[stream].save_weights(saved)
        assert (saved / ADAPTER).read_bytes() == (folder / ADAPTER).read_bytes()


def disturbed(stored: ArtifactRef, column: str, store: ArtifactStore) -> ArtifactRef:
    """The rollouts with other log-probs in a column, committed in their place."""
    table = pl.read_parquet(sorted(store.local_files(stored).glob("*.parquet")))
    with store.staging() as staged:
        for path in store.local_files(stored).rglob("*.parquet"):
            target = staged / path.relative_to(store.local_files(stored))
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
        (written,) = staged.glob("*.parquet")
        table.with_columns(pl.col(column).list.eval(pl.element() + 0.01)).write_parquet(written)
        return store.commit(
            staged,
            f"{stored.folder}-disturbed",
            digest="disturbed",
            schema_version=stored.schema_version,
            rows=stored.rows,
            seconds=0.0,
            metrics={},
        )


@pytest.mark.parametrize(("column", "stream"), [("rollout_logprobs", "tokens"), ("denoising_logprobs", "denoising")])
def test_a_gate_of_either_component_stops_the_version(
    column: str, stream: Stream, store: ArtifactStore, tmp_path: Path
) -> None:
    """The next use of the policy in memory loads the weights of the version that it asks for."""
    job = joint_job(UPDATES)
    rollouts = disturbed(job.rollouts[0], column, store)
    with pytest.raises(ParityError):
        alone(job.model_copy(update={"rollouts": (rollouts,)}), tmp_path / "refused")
    assert not (tmp_path / "refused" / "training_state.json").exists()
    policy = resource(ResidentPolicy).at(job.policy, job.model, JOINT.rollout, PlacementSection(device="cpu"))
    for component in policy.components.values():
        started = {name: value.detach() for name, value in component.trainable_parameters().items()}
        assert all(not value.any() for name, value in started.items() if "lora_B" in name)
    alone(job, tmp_path / "after")
    with run_resources():
        alone(job, tmp_path / "fresh")
    assert weights_digest(tmp_path / "after") == weights_digest(tmp_path / "fresh")


def test_a_decoder_alone_is_stored_without_a_subfolder(store: ArtifactStore, tmp_path: Path) -> None:
    outcome = alone(joint_job({"denoising": DENOISING}, modality=DECODER), tmp_path / "one")
    assert json.loads((tmp_path / "one" / "training_state.json").read_text())["optimizer_steps"] == 2
    assert all("transformer_blocks" in name for name in load_file(tmp_path / "one" / ADAPTER))
    assert outcome.metrics["sampling/sampling_logp_difference/max"] <= 1e-5
    assert outcome.rows == 6


def test_a_job_arrives_in_another_process_as_it_is(store: ArtifactStore) -> None:
    rollouts = TEXTS.collect()
    adapted = changed(JOINT, lora=LoraSection(modules_to_save=("proj_out", "lm_head")))
    job = job_of(adapted, rollouts, advantages_of(rollouts), update=UPDATES)
    arrived = UpdateJob.model_validate_json(job.model_dump_json())
    assert arrived.model == job.model
    assert {stream: update.model_dump() for stream, update in arrived.updates.items()} == {
        stream: update.model_dump() for stream, update in UPDATES.items()
    }


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("change", [_flip, Path.unlink], ids=["a flipped byte", "a missing file"])
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


def test_a_kill_between_the_components_leaves_no_version(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The files of the first component were written; the next start makes the version that an undisturbed one makes."""
    job = joint_job(UPDATES)
    arguments = (job.policy, job.rollouts, job.advantages, job.model, job.updates, job.seed, job.max_staleness)

    def make() -> PolicyRef:
        return update_policy_task.fn(*arguments, "iteration 1", job.placement)

    def killed(self: GlmImageDecoder, folder: Path) -> None:
        assert (folder.parent / "tokens" / ADAPTER).is_file()
        raise KilledError

    with run_resources(), monkeypatch.context() as patched:
        patched.setattr(GlmImageDecoder, "save_weights", killed)
        with pytest.raises(KilledError):
            make()
        assert store.find("policies/000001") is None
        patched.undo()
        again = make()
    with run_resources():
        outcome = alone(job, tmp_path / "undisturbed")
    assert (again.digest, again.checkpoint and again.checkpoint.digest) == (outcome.digest, outcome.checkpoint_digest)
    # A version that is damaged after the states were pruned cannot be made again.
    store.clear_place("policies/000001", reason="a bit fell")
    replace_artifact(store, job.rollouts[0], None, pruned={"removed": STATES_REMOVED})
    with pytest.raises(InputError, match=r"policies/000001: got 'damaged'. .*\(a bit fell\).*: the states of "):
        make()


def test_progress_covers_both_components(store: ArtifactStore, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    carry_out(joint_job(UPDATES), tmp_path, SINGLE_PROCESS, lambda done, total: seen.append((done, total)))
    shares = [done / total for done, total in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert 0.5 in shares
