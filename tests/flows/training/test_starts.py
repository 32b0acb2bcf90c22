"""How a run starts: from another run's adapter, with a moving average, and as the only writer of its folder."""

import asyncio
import contextvars
import io
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest
from PIL import Image
from typer.testing import CliRunner

from configs.loader import read_config
from flows.command_line.main import application
from flows.evaluation import plan_evaluate
from flows.requests import EvaluateRequest
from flows.training import train as training
from tasks.progress import listen
from tasks.runs.stored_policies import choose_policy, read_policy
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.run_lock import LockLostError, locked
from tests.flows.conftest import EVALUATED, TINY, Compare, Runs, printed_summary, refused, training_process
from tests.flows.replaying.test_replaying import run_replay
from tests.flows.rescoring.test_rescore import JPEG, SSIM, scored_again
from tests.flows.training.test_train import FIRST


@pytest.mark.slow
def test_a_run_starts_from_a_version_of_another(empty: Runs) -> None:
    first = empty.start("first", update__kl_coef=0.1, **EVALUATED)
    adapted = {"policy__lora": None, "update__kl_coef": 0.1, "run__iterations": 1, **EVALUATED}
    second = empty.start("second", policy__adapter="first@2", **adapted)
    assert second.summary.heldout_before == first.summary.heldout_after
    kl = empty.steps(1, "second")["kl"]
    # The KL is that to the adapter, and not to the model under it.
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[1] > 0
    assert empty.start("second", policy__adapter="first@2", **adapted).stages == ()
    for adapter in ("first@9", "first@0", "frist@2"):
        (error,) = refused(lambda adapter=adapter: empty.start("third", policy__adapter=adapter, **adapted))
        assert (error.place, error.value) == ("policy.adapter", adapter)
    (error,) = refused(lambda: empty.start("third", policy__adapter="first@2", policy__lora__rank=8))
    assert (error.place, error.value) == ("policy.lora.rank", 8)


@pytest.mark.slow
def test_evaluations_sample_with_the_moving_average_and_rollouts_do_not(empty: Runs) -> None:
    start = empty.start(update__ema=0.5, **EVALUATED)
    store = ArtifactStore(str(empty.root), "run")
    policies = {version: read_policy(store, version) for version in (1, 2)}
    assert start.summary.policy_digest == policies[2].digest

    def sampler(place: str, run: str = "run") -> str:
        (digest,) = pl.read_parquet(empty.path(place, "rollouts", "part-*.parquet", run=run))["policy_digest"].unique()
        return str(digest)

    assert sampler("iteration_000002") == policies[1].digest
    assert sampler("evaluations/000002") == policies[2].copies["ema"] != policies[2].digest
    assert plan_evaluate(EvaluateRequest(run="run@2", root=str(empty.root))).stored is not None
    # A run that continues does so from the weights, and begins an average of its own.
    empty.start("continued", run__continue_from="run@2", run__iterations=1, update__ema=0.5, **EVALUATED)
    assert sampler("evaluations/000000", "continued") == sampler("iteration_000001", "continued") == policies[2].digest
    continued = read_policy(ArtifactStore(str(empty.root), "continued"), 1)
    assert sampler("evaluations/000001", "continued") == continued.copies["ema"] != continued.digest


ADAPTER = {"rank": 8, "alpha": 8.0}


@pytest.mark.slow
def test_weights_go_on_and_the_optimizer_begins_anew(finished: Runs) -> None:
    source = read_policy(ArtifactStore(str(finished.root), "run"), 1)
    begun = finished.start("next", run__continue_from="run@1", run__iterations=1, update__learning_rate=1e-3)
    assert begun.stages == FIRST
    (row, *_) = finished.tables("next")["iteration_000001/rollouts/part-00000.parquet"]
    assert (row["policy_version"], row["policy_digest"]) == (0, source.digest)
    assert finished.steps(1, "next")["optimizer_step"].to_list() == [1, 2]
    # The reference is still the model: the policy differs from it before the first step.
    assert finished.steps(1, "run")["kl"][0] == pytest.approx(0.0, abs=1e-12)
    assert finished.steps(1, "next")["kl"][0] > 1e-9
    initial, _ = choose_policy(ArtifactStore(str(finished.root), "next"), 0, "the model's digest")
    assert (initial.version, initial.digest) == (0, source.digest)

    shutil.rmtree(finished.path())
    again = finished.start("next", run__iterations=1, update__learning_rate=1e-3)
    assert again.stages == ()
    assert again.summary.policy_digest == begun.summary.policy_digest
    assert "continue_from: run@1" in finished.path("config.yaml", run="next").read_text()


@pytest.mark.slow
@pytest.mark.slow
def test_without_a_version_it_is_the_last_one_when_the_run_began(finished: Runs) -> None:
    begun = finished.start("next", run__continue_from="run", run__iterations=1)
    finished.start(run__iterations=3)
    for start in ("run", "run@2", None):
        again = finished.start("next", run__continue_from=start, run__iterations=1)
        assert again.stages == ()
        assert again.summary.policy_digest == begun.summary.policy_digest


@pytest.mark.slow
def test_another_adapter_is_refused_with_what_the_source_has(finished: Runs) -> None:
    (error,) = refused(lambda: finished.start("next", run__continue_from="run", policy__lora=ADAPTER))
    assert (error.place, error.value["rank"]) == ("policy.lora", 8)
    assert not finished.path("config.yaml", run="next").exists()


@pytest.mark.slow
def test_a_source_that_has_trained_nothing_yet_is_refused(finished: Runs) -> None:
    shutil.copytree(finished.path(), finished.path(run="next"))
    shutil.rmtree(finished.path("policies", run="next"))
    (error,) = refused(lambda: finished.start("third", run__continue_from="next", run__iterations=1))
    assert (error.place, error.value) == ("run.continue_from", "next")


REWARDS = (
    {"reward": "ssim", "datasets": ["shapes"]},
    {"reward": "jpeg", "settings": {"direction": "compressible"}},
    {"reward": "diversity", "weight": 0.1},
)


def settings(folder: Path) -> dict[str, object]:
    """Two data sets: 64x64 with targets, as the rollout has it, and one of 32x32 with other sizes in its rows."""
    rows = [{"prompt": "a red circle"}, {"prompt": "a blue cross", "size": "64x32"}, {"prompt": "a pink heart"}]
    rows.append({"prompt": "a red circle", "width": 40, "height": 64})
    (folder / "mixed.json").write_text(json.dumps(rows))
    shapes = {"name": "shapes", "targets": "data/targets", "target_column": "target"}
    mixed = {"name": "mixed", "prompts": f"{folder}/mixed.json", "width": 32, "height": 32}
    return {
        "data": {"datasets": [{**shapes, "prompts": "data/prompts/shapes_train.jsonl"}, mixed]},
        "evaluate": {"datasets": [{**shapes, "prompts": "data/prompts/shapes_heldout.jsonl", "limit": 2}, mixed]},
        "rewards": REWARDS,
        "rollout__prompts_per_iteration": 6,
        "rollout__group_size": 3,
        "rollout__prompts_per_batch": 2,
        "rollout__height": 64,
        "rollout__width": 64,
        "rollout__top_p": 0.9,
        # Microbatches of several sizes.
        "update__micro_batch_size": 4,
        "update__minibatch_size": 9,
        "update__kl_coef": 0.01,
    }


def sizes_of(table: pl.DataFrame) -> set[tuple[str, int, int]]:
    return {*table.select("dataset", "width", "height").iter_rows()}


@pytest.mark.slow
@pytest.mark.slow
def test_a_run_of_several_sizes_comes_through(server: None, tmp_path: Path) -> None:
    whole, killed = Runs(tmp_path / "whole"), Runs(tmp_path / "killed")
    given = settings(tmp_path)
    digest = whole.start(**given).summary.policy_digest

    rollouts = pl.concat(
        [pl.read_parquet(path) for path in sorted(whole.path().glob("iteration_*/rollouts/part-*.parquet"))]
    )
    expected = {("shapes", 64, 64), ("mixed", 32, 32), ("mixed", 64, 32), ("mixed", 40, 64)}
    assert sizes_of(rollouts) == expected
    images = pl.read_parquet(whole.path("iteration_*/rollouts/images-*.parquet"), columns=["sample_id", "image"])
    rollouts = rollouts.join(images, on="sample_id", validate="1:1")
    lengths = {(64, 64): 80, (32, 32): 32, (64, 32): 42, (40, 64): 55}
    for row in rollouts.iter_rows(named=True):
        size = (row["width"], row["height"])
        assert Image.open(io.BytesIO(row["image"]["bytes"])).size == size
        assert (row["length"], row["max_length"]) == (lengths[size], 80)
    assert max(whole.metrics(iteration)["sampling/sampling_logp_difference/max"] for iteration in (1, 2)) < 1e-4
    assert sizes_of(pl.read_parquet(whole.path("evaluations/000002/rollouts/part-*.parquet"))) == expected

    with training_process(killed, tmp_path / "process", **given) as process:
        while not killed.path("iteration_000002/rollouts/part-00000.parquet").exists():
            assert process.poll() is None
            time.sleep(0.01)
    assert killed.start(**given).summary.policy_digest == digest

    other = ({"reward": "psnr", "datasets": ["shapes"]}, {"reward": "edge_density"}, REWARDS[2])
    digests = set()
    for runs in (whole, killed):
        _, heard = scored_again(runs, *other, name="other")
        assert sum("score edge_density" in stage for stage in heard.stages) == 2
        assert run_replay(runs)[0].policy_digest == digest
        digests.add(run_replay(runs, name="other", advantages="other")[0].policy_digest)
    assert len(digests) == 1
    assert killed.tables() == whole.tables()


@contextmanager
def held(runs: Runs, place: str = "") -> Iterator[None]:
    with locked(ArtifactStore(str(runs.root), "run"), place, setting="run.name", value="run"):
        yield


def test_a_second_training_is_refused_before_anything_is_touched(finished: Runs) -> None:
    other = ["--set", "update.learning_rate=0.1"]
    with held(finished):
        before = finished.tables()
        result = CliRunner().invoke(application, ["train", str(TINY), *finished.sets(), *other])
        assert result.exit_code == 2
        assert result.stderr.startswith("error: run.name: got 'run'.")
        assert f"process {os.getpid()}" in result.stderr
        assert finished.tables() == before
        assert finished.reasons() == []
    assert finished.start().stages == ()


def test_rescorings_are_held_by_name(finished: Runs) -> None:
    with held(finished), held(finished, "rescored/other"):
        (error,) = refused(lambda: scored_again(finished, SSIM))
        assert (error.place, error.value) == ("--name", "other")
        assert not finished.path("rescored", "other", "rewards.yaml").exists()
        summary, _ = scored_again(finished, JPEG, name="another")
    assert summary.samples == 8


class Remover:
    """Removes the lock after the first iteration, as a person who deletes the folder would."""

    def __init__(self, lock: Path) -> None:
        self.lock = lock

    def advance(self, stage: str, done: int, total: int) -> None:
        pass

    def log(self, line: str) -> None:
        if line.startswith("iteration 1/"):
            self.lock.unlink()


@pytest.mark.slow
def test_training_that_lost_its_run_stops_at_the_next_stage(empty: Runs, final: Compare) -> None:
    config = read_config(TINY, empty.overrides(run__name="run"))

    def body() -> None:
        listen(Remover(empty.path(".lock")))
        asyncio.run(training.train(config))

    with pytest.raises(LockLostError, match="moved or removed"):
        contextvars.copy_context().run(body)
    assert not empty.path("iteration_000002").exists()
    again = empty.start()
    assert again.stages[0] == "iteration 2: collect rollouts"
    final(empty, again)


@pytest.mark.slow
def test_a_living_training_is_left_alone_and_may_be_rescored(empty: Runs, final: Compare, tmp_path: Path) -> None:
    with training_process(empty, tmp_path) as child:
        while not empty.path("iteration_000002", "advantages.manifest.json").exists():
            assert child.poll() is None, (tmp_path / "err").read_text()
            time.sleep(0.01)
        # In the update; at the end of the stage before it held the lock of commits.
        time.sleep(0.1)
        os.kill(child.pid, signal.SIGSTOP)
        (error,) = refused(empty.start)
        assert (error.place, error.value) == ("run.name", "run")
        assert f"process {child.pid}" in error.hint
        assert scored_again(empty, JPEG, iterations="1")[0].samples == 4
        assert not empty.path("policies", "000002.manifest.json").exists()
        os.kill(child.pid, signal.SIGCONT)
        while child.poll() is None:
            scored_again(empty, JPEG, name=f"beside-{len(list(empty.path('rescored').iterdir()))}", iterations="1")
        assert child.returncode == 0, (tmp_path / "err").read_text()
    again = empty.start()
    assert again.stages == ()
    assert printed_summary(tmp_path)["policy_digest"] == again.summary.policy_digest
    assert scored_again(empty, JPEG, name="after")[0].samples == 8
    shutil.rmtree(empty.path("rescored"))
    final(empty, again)
