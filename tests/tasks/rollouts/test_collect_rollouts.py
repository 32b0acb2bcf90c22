"""Rollouts with both streams: what the policy recorded is what is stored, to the bit, and what an update reads."""

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from data.recipes.shapes import BACKGROUNDS
from grpo_core.policies.protocol import policy_family
from grpo_core.rollouts.actions import DenoisingBatch, TokenBatch
from grpo_core.rollouts.records import GroupRequest, RolloutGroup
from grpo_core.rollouts.streams import Stream
from tasks.execution.stage import stage_named
from tasks.rollouts.collect_rollouts import background
from tasks.runs import stored_streams
from tasks.runs.stored_streams import StatesWriter, map_states, state_digests
from tasks.storage.artifacts.reference import ArtifactRef, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tasks.update.rows import StoredRows, read_training_rows
from tests.tasks.reports.made_runs import flip_last_byte
from tests.tasks.rollouts.both_streams import (
    PLACEMENT,
    ROLLOUT,
    WINDOW,
    collect,
    made_group,
    plan,
    policy,
    random_states,
    sampled,
)
from tests.tasks.stage_calls import table_of
from tests.tasks.update.update_jobs import JOINT, advantages_table


@pytest.fixture(scope="module")
def sampled_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[ArtifactStore, ArtifactRef]:
    store = ArtifactStore(str(tmp_path_factory.mktemp("one")), "run")
    use_store(store)
    return store, collect(plan(prompts=1))


@pytest.fixture
def one(store: ArtifactStore, sampled_once: tuple[ArtifactStore, ArtifactRef]) -> ArtifactRef:
    """The rollouts of one prompt, in the store of the test."""
    shutil.copytree(sampled_once[0].path(), store.path())
    return sampled_once[1]


def read(
    store: ArtifactStore, rollouts: ArtifactRef, advantages: ArtifactRef, scratch: Path, stream: Stream
) -> StoredRows:
    scratch.mkdir(exist_ok=True)
    family = policy_family("glm_image")
    return read_training_rows(store, [rollouts], advantages, policy(), family, scratch, stream=stream, max_staleness=0)


def rows_in_memory(groups: list[RolloutGroup], stream: Stream) -> dict[str, tuple[Any, Tensor]]:
    return {
        sample_id: (group.streams[stream].actions.select([row]), group.streams[stream].rollout_logprobs[row])
        for group in groups
        for row, sample_id in enumerate(group.request.sample_ids)
    }


def same_tokens(found: TokenBatch | DenoisingBatch, expected: TokenBatch | DenoisingBatch) -> bool:
    return (
        found.prompts == expected.prompts
        and torch.equal(found.trimmed().token_ids, expected.trimmed().token_ids)
        and torch.equal(found.trimmed().loss_mask, expected.trimmed().loss_mask)
        and found.temperature == expected.temperature
    )


def test_what_was_recorded_is_what_is_trained_on(store: ArtifactStore, tmp_path: Path) -> None:
    planned = plan()
    groups, rollouts = sampled(planned), collect(planned)
    renderings = ["i000001.p0000.s00.r00", "i000001.p0000.s00.r01", "i000001.p0001.s00.r01"]
    drafts = ["i000001.p0000.s00.r00", "i000001.p0000.s01.r00", "i000001.p0001.s02.r00"]
    advantages = advantages_table(
        rollouts,
        {
            **{(name, "tokens"): 1.0 + place for place, name in enumerate(drafts)},
            **{(name, "denoising"): -1.0 - place for place, name in enumerate(renderings)},
            ("i000001.p0001.s00.r00", "denoising"): None,
        },
    )
    tokens = read(store, rollouts, advantages, tmp_path / "tokens", "tokens").rows
    expected = rows_in_memory(groups, "tokens")
    assert tokens.sample_ids == tuple(drafts)
    assert tokens.advantages.tolist() == [1.0, 2.0, 3.0]
    for row, name in enumerate(drafts):
        batch, logprobs = expected[name]
        assert same_tokens(tokens.actions.select([row]), batch)
        assert torch.equal(tokens.rollout_logprobs.select([row])[0], logprobs)

    stored = read(store, rollouts, advantages, tmp_path / "denoising", "denoising")
    denoising, steps = stored.rows, stored.rows.actions
    assert denoising.sample_ids == tuple(renderings)
    assert (denoising.max_length, denoising.finished.tolist()) == (WINDOW, [True] * 3)
    assert steps.first_steps == (0, 0, 0)
    for row, name in enumerate(renderings):
        batch, logprobs = rows_in_memory(groups, "denoising")[name]
        assert steps.states[row].dtype == batch.states[0].dtype
        assert torch.equal(steps.states[row], batch.states[0])
        assert torch.equal(denoising.rollout_logprobs.select([row])[0], logprobs)
        assert same_tokens(steps.drafts.select([row]), expected[name][0])
        assert steps.sizes[row] == batch.sizes[0]
    for name in ("sde_type", "noise_level", "sde_window_size", "logprob_reduction", "num_inference_steps"):
        assert getattr(stored.settings, name) == getattr(ROLLOUT, name)
    assert tuple(stored.settings.sde_window_range) == ROLLOUT.sde_window_range


def test_renderings_of_a_draft_differ_by_their_steps_alone(store: ArtifactStore, one: ArtifactRef) -> None:
    planned, rollouts = plan(prompts=1), one
    table = table_of(store, rollouts)
    assert table["step_seed"].to_list() == list(planned.request(planned.groups[0]).step_seeds)
    assert table["token_sample"].to_list() == [0, 0, 1, 2]
    assert table["image_number"].to_list() == [0, 1, 0, 0]
    tokens, steps = table["token_ids"].to_list(), table["denoising_logprobs"].to_list()
    assert tokens[0] == tokens[1] != tokens[2]
    assert [len(each) for each in steps] == [WINDOW] * 4
    assert len({tuple(each) for each in steps}) == 4
    # A draft counts once.
    assert rollouts.metrics["completions/token_samples"] == 3.0
    drafts = table.filter(pl.col("image_number") == 0)
    assert rollouts.metrics["tokens"] == sum([*drafts["length"], *drafts["prompt_length"]])
    assert rollouts.metrics["completions/mean_length"] == drafts["length"].mean()


def test_rollouts_without_noisy_steps_have_no_trace_of_them(store: ArtifactStore) -> None:
    rollouts = collect(plan(window_start=None, images_of_samples=(1, 1), prompts=1))
    folder = store.local_files(rollouts)
    assert sorted(path.name for path in folder.iterdir()) == ["images-00000.parquet", "part-00000.parquet"]
    assert not [name for name in table_of(store, rollouts).columns if name.startswith(("sde", "denoising", "step"))]
    assert "completions/token_samples" not in rollouts.metrics


def test_a_flipped_byte_of_states_is_found_by_an_update(store: ArtifactStore, one: ArtifactRef, tmp_path: Path) -> None:
    rollouts = one
    names = table_of(store, rollouts)["sample_id"].to_list()[:2]
    advantages = advantages_table(
        rollouts, {(name, stream): 1.0 for name in names for stream in ("tokens", "denoising")}
    )
    flip_last_byte(Path(store.path(f"{rollouts.folder}/states/part-00000-00000.safetensors")))
    assert len(read(store, rollouts, advantages, tmp_path / "tokens", "tokens").rows) == 2
    with pytest.raises(StaleReferenceError, match=r"states/part-00000-00000\.safetensors has sha256"):
        read(store, rollouts, advantages, tmp_path / "denoising", "denoising")
    assert store.find(rollouts.folder) is None


def test_shards_have_the_digest_and_the_rows_of_one(store: ArtifactStore) -> None:
    planned = plan(prompts=2)
    whole = collect(planned)
    tables = {path.relative_to(store.local_files(whole)): path for path in store.local_files(whole).rglob("*.parquet")}
    sharding = stage_named("collect rollouts").sharding
    arguments = {
        "policy": policy(),
        "plan": planned.model_copy(update={"folder": "iteration_000002"}),
        "model": JOINT.spec(),
        "rollout": ROLLOUT,
        "with_reference": False,
        "placement": PLACEMENT,
    }
    parts = [collect(part.arguments["plan"]) for part in sharding.cut(arguments, 2)]
    assert [part.rows for part in parts] == [4, 4]
    joined = sharding.join(arguments, parts)
    assert (joined.digest, joined.rows, joined.metrics) == (whole.digest, whole.rows, whole.metrics)
    folder = store.local_files(joined)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*-0*")) == [
        "images-00000.parquet",
        "images-00001.parquet",
        "part-00000.parquet",
        "part-00001.parquet",
        "states/part-00000-00000.safetensors",
        "states/part-00001-00000.safetensors",
    ]
    for name, path in tables.items():
        pattern = name.name.replace("00000", "*")
        assert pl.read_parquet(sorted((folder / name.parent).glob(pattern))).equals(pl.read_parquet(path))


class Killed(BaseException):
    """Ends the stage as a signal would."""


def test_a_kill_before_the_states_is_no_stage(
    store: ArtifactStore, one: ArtifactRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(store.path("iteration_000001"))

    def kill(self: StatesWriter) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(StatesWriter, "close", kill)
        with pytest.raises(Killed):
            collect(plan(prompts=1))
    assert store.find("iteration_000001/rollouts") is None
    assert not Path(store.path("iteration_000001/rollouts")).exists()
    assert collect(plan(prompts=1)).digest == one.digest


def test_a_digest_covers_every_state(one: ArtifactRef, monkeypatch: pytest.MonkeyPatch) -> None:
    write = StatesWriter.write

    def changed(self: StatesWriter, group: RolloutGroup) -> None:
        steps = group.streams["denoising"].actions
        place = group.request.sample_ids.index("i000001.p0000.s02.r00")
        steps.states[place].view(-1).view(torch.uint8)[-1] ^= 1
        write(self, group)

    monkeypatch.setattr(StatesWriter, "write", changed)
    assert collect(plan(prompts=1)).digest != one.digest


TARGETS = Path(__file__).resolve().parents[3] / "data" / "targets"


def test_the_border_decides_and_of_two_colours_the_darker_one() -> None:
    files = sorted(TARGETS.glob("*.png"))
    assert files
    for file in files:
        with Image.open(file) as target:
            assert background(target) == BACKGROUNDS[file.stem.rpartition("-")[2]]
    framed = Image.new("RGB", (9, 7), (200, 0, 0))
    framed.paste((0, 0, 9), (1, 1, 8, 6))
    assert background(framed) == (200, 0, 0)
    halves = Image.new("RGB", (4, 4), (10, 200, 200))
    halves.paste((10, 199, 255), (0, 0, 2, 4))
    assert background(halves) == (10, 199, 255)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def request_for(names: tuple[str, ...]) -> GroupRequest:
    seeds = tuple(range(len(names)))
    return GroupRequest("a cup", names, (0,) * len(names), seeds, seeds, window_start=0)


def write_states(folder: Path, groups: list[dict[str, Tensor]]) -> Path:
    writer = StatesWriter(folder)
    for states in groups:
        writer.write(made_group(request_for(tuple(states)), states))
    writer.close()
    return folder


def read_states(folders: list[Path], names: list[str]) -> tuple[Tensor, ...]:
    return map_states(folders, pl.Series("sample_id", names, dtype=pl.String))


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=6))
def test_states_of_any_dtype_and_shape_come_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, samples: list[tuple[torch.dtype, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("states")
    states = {
        f"s{place}": random_states(place, (channels, side, 3), dtype)
        for place, (dtype, channels, side) in enumerate(samples)
    }
    # Infinite values and signed zeros are values.
    states["odd"] = torch.tensor([0.0, -0.0, float("inf"), float("nan")], dtype=torch.float16).repeat(WINDOW + 1, 1)
    write_states(folder, [states])
    names = list(reversed(states))
    for name, found in zip(names, read_states([folder], names), strict=True):
        assert (found.dtype, found.shape) == (states[name].dtype, states[name].shape)
        assert torch.equal(found.view(torch.uint8), states[name].contiguous().view(torch.uint8))


def test_some_samples_of_several_artifacts_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {name: random_states(place, (2, 3), torch.float16) for place, name in enumerate("abcdef")}
    write_states(tmp_path / "one", [{name: states[name]} for name in "abc"])
    monkeypatch.setattr(stored_streams, "STATES_BYTES", 1)
    write_states(tmp_path / "1", [{"a": states["a"], "b": states["b"]}, {"c": states["c"]}])
    write_states(tmp_path / "2", [{name: states[name]} for name in "def"])
    parts = sorted((tmp_path / "1" / "states").iterdir())
    assert [path.name for path in parts] == ["part-00000-00000.safetensors", "part-00000-00001.safetensors"]
    # The digests are those of one file.
    (one,) = (tmp_path / "one" / "states").iterdir()
    assert [digest for path in parts for digest in state_digests(path)] == state_digests(one)
    assert len(set(state_digests(one))) == 3
    chosen = ["f", "b", "c"]
    found = read_states([tmp_path / "1", tmp_path / "2"], chosen)
    assert all(torch.equal(one, states[name]) for one, name in zip(found, chosen, strict=True))
    assert read_states([tmp_path / "1"], []) == ()
    with pytest.raises(ValueError, match=r"\bf\b"):
        read_states([tmp_path / "1"], ["a", "f"])


def test_mapped_states_outlive_their_file_and_writing_keeps_no_batch(tmp_path: Path) -> None:
    """`grpo prune` may delete what an update has opened; and what waits is no view of all that was sampled at once."""
    batch = random_states(0, (2, 16, 3), torch.float16)
    folder = write_states(tmp_path, [{"a": batch[..., :1], "b": batch[..., 1:]}])
    (path,) = (folder / "states").iterdir()
    assert path.stat().st_size < batch.nbytes + 1000
    found = read_states([folder], ["b"])
    path.unlink()
    assert torch.equal(found[0], batch[..., 1:])
