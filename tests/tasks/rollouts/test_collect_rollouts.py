"""Rollouts with both streams: what the policy recorded is what is stored, and what an update reads."""

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from PIL import Image
from torch import Tensor

from data.recipes.shapes import BACKGROUNDS
from grpo_core.actions import DenoisingBatch, TokenBatch
from grpo_core.policies.protocol import policy_family
from grpo_core.records import RolloutGroup
from grpo_core.streams import Stream
from tasks.execution.stage import stage_named
from tasks.rollouts.collect_rollouts import background
from tasks.rollouts.streams import StatesWriter
from tasks.storage.artifacts.reference import ArtifactRef, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.update.rows import StoredRows, read_training_rows
from tests.tasks.reports.made_runs import flip_last_byte
from tests.tasks.rollouts.both_streams import PLACEMENT, ROLLOUT, WINDOW, collect, plan, policy, sampled
from tests.tasks.stage_calls import table_of
from tests.tasks.update.update_jobs import JOINT, advantages_table


def read(
    store: ArtifactStore, rollouts: ArtifactRef, advantages: ArtifactRef, scratch: Path, stream: Stream
) -> StoredRows:
    scratch.mkdir(exist_ok=True)
    family = policy_family("glm_image")
    return read_training_rows(store, [rollouts], advantages, policy(), family, scratch, stream=stream, max_staleness=0)


def rows_in_memory(groups: list[RolloutGroup], stream: Stream) -> dict[str, tuple[Any, Tensor]]:
    """Actions of one row and their log-probs, by sample."""
    return {
        sample_id: (group.streams[stream].actions.select([row]), group.streams[stream].rollout_logprobs[row])
        for group in groups
        for row, sample_id in enumerate(group.request.sample_ids)
    }


def same_tokens(found: TokenBatch | DenoisingBatch, expected: TokenBatch | DenoisingBatch) -> bool:
    assert isinstance(found, TokenBatch)
    assert isinstance(expected, TokenBatch)
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
        assert torch.equal(tokens.rollout_logprobs[row], logprobs)

    stored = read(store, rollouts, advantages, tmp_path / "denoising", "denoising")
    denoising, steps = stored.rows, stored.rows.actions
    assert isinstance(steps, DenoisingBatch)
    assert steps.drafts is not None
    assert denoising.sample_ids == tuple(renderings)
    assert (denoising.max_length, denoising.finished.tolist()) == (WINDOW, [True] * 3)
    assert steps.first_steps == (0, 0, 0)
    for row, name in enumerate(renderings):
        batch, logprobs = rows_in_memory(groups, "denoising")[name]
        assert steps.states[row].dtype == batch.states[0].dtype
        assert torch.equal(steps.states[row], batch.states[0])
        assert torch.equal(denoising.rollout_logprobs[row], logprobs)
        assert same_tokens(steps.drafts.select([row]), expected[name][0])
        assert steps.sizes[row] == batch.sizes[0]
    for name in ("sde_type", "noise_level", "sde_window_size", "logprob_reduction", "num_inference_steps"):
        assert getattr(stored.settings, name) == getattr(ROLLOUT, name)
    assert tuple(stored.settings.sde_window_range) == ROLLOUT.sde_window_range


def test_renderings_of_a_draft_differ_by_their_steps_alone(store: ArtifactStore) -> None:
    planned = plan(prompts=1)
    rollouts = collect(planned)
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


def test_a_flipped_byte_of_states_is_found_by_an_update_and_left_alone_by_others(
    store: ArtifactStore, tmp_path: Path
) -> None:
    rollouts = collect(plan(prompts=1))
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
    planned = plan(prompts=3)
    whole = collect(planned)
    one = {path.relative_to(store.local_files(whole)): path for path in store.local_files(whole).rglob("*.parquet")}
    sharding = stage_named("collect rollouts").sharding
    assert sharding is not None
    arguments = {
        "policy": policy(),
        "plan": planned.model_copy(update={"folder": "iteration_000002"}),
        "model": JOINT.spec(),
        "rollout": ROLLOUT,
        "with_reference": False,
        "placement": PLACEMENT,
    }
    parts = [collect(part.arguments["plan"]) for part in sharding.cut(arguments, 2)]
    assert [part.rows for part in parts] == [4, 8]
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
    for name, path in one.items():
        pattern = name.name.replace("00000", "*")
        assert pl.read_parquet(sorted((folder / name.parent).glob(pattern))).equals(pl.read_parquet(path))


class Killed(BaseException):
    """Ends the stage as a signal would."""


def test_a_stage_that_ends_between_table_and_states_leaves_nothing(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = collect(plan(prompts=1))
    shutil.rmtree(store.path("iteration_000001"))

    def kill(self: StatesWriter) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(StatesWriter, "close", kill)
        with pytest.raises(Killed):
            collect(plan(prompts=1))
    assert store.find("iteration_000001/rollouts") is None
    assert not Path(store.path("iteration_000001/rollouts")).exists()
    assert collect(plan(prompts=1)).digest == whole.digest


def test_a_digest_covers_every_state(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collect(plan(prompts=1))
    write = StatesWriter.write

    def changed(self: StatesWriter, group: RolloutGroup) -> None:
        steps = group.streams["denoising"].actions
        assert isinstance(steps, DenoisingBatch)
        place = group.request.sample_ids.index("i000001.p0000.s02.r00")
        steps.states[place].view(-1).view(torch.uint8)[-1] ^= 1
        write(self, group)

    monkeypatch.setattr(StatesWriter, "write", changed)
    assert collect(plan(prompts=1)).digest != whole.digest


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
