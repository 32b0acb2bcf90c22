"""A replay as it is asked for: by the program, of any root, and refused where it cannot be done."""

import asyncio
import inspect
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.command_line.main import replay as command
from flows.replay.replay import replay
from flows.replay.request import MAX_STALENESS, ReplayRequest, plan_replay, root_of
from grpo_core.errors import InputErrors
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.filesystem.checked_json import dump_checked, load_checked
from tests.flows.conftest import REPOSITORY, Runs, Start
from tests.flows.replays import content, policy_digest, refused, run_replay


class TestBadInput:
    def test_no_such_run(self, finished: Runs) -> None:
        (error,) = refused(finished, source="rum")
        assert error.place == "RUN"
        assert "run" in error.hint

    def test_no_stored_rollouts(self, finished: Runs) -> None:
        for name in ("iteration_000001", "iteration_000002"):
            shutil.rmtree(finished.path(name))
        (error,) = refused(finished)
        assert "no iteration with stored rollouts" in error.hint

    def test_a_replay_has_nothing_to_replay(self, finished: Runs) -> None:
        run_replay(finished)
        with pytest.raises(InputErrors, match=r"run-replay/iteration_000001/rollouts.*missing"):
            plan_replay(ReplayRequest("run-replay", str(finished.root)))

    def test_a_damaged_iteration_is_named_and_left_alone(self, finished: Runs) -> None:
        place = finished.path("iteration_000002/rollouts/part-00000.parquet")
        place.write_bytes(place.read_bytes()[:-1])
        before = content(finished.path())
        (error,) = refused(finished)
        assert error.place == "run/iteration_000002/rollouts"
        assert content(finished.path()) == before

    def test_an_unfinished_iteration_is_not_among_them(self, finished: Runs) -> None:
        finished.path("iteration_000002/advantages.manifest.json").unlink()
        summary, _ = run_replay(finished)
        assert summary.source_iterations == [1]
        with pytest.raises(InputErrors, match="no complete iteration 2"):
            plan_replay(ReplayRequest("run", str(finished.root), iterations="1-2"))

    @pytest.mark.parametrize("text", ["0", "2-1", "a", "1-", "1,2", ""])
    def test_iterations_that_are_no_range(self, finished: Runs, text: str) -> None:
        (error,) = refused(finished, iterations=text)
        assert (error.place, error.value) == ("--iterations", text)

    @pytest.mark.parametrize(
        ("overrides", "options", "place", "hint"),
        [
            ((), {"advantages": "storde"}, "--advantages", "Nearest: stored"),
            ((), {"policy": 9}, "--policy", "1 to 2"),
            ((), {"policy": -1}, "--policy", "0 or more"),
            ((), {"max_staleness": -1}, "--max-staleness", "0 or more"),
            ((), {"iterations": "2-3"}, "--iterations", "no complete iteration 3"),
            ((), {"name": "run"}, "--run", "never changed"),
            (("data.limit=3",), {}, "--set", "stored rollouts"),
            (("storage.root=elsewhere",), {}, "--set", "--root"),
            (("run.iterations=3",), {}, "--set", "--iterations"),
            (("policy.model=other",), {}, "--set", "source's model"),
            (("update.mismatch.mode=none",), {}, "update.mismatch.mode", "truncate or mask"),
            (("update.learning_rat=1",), {}, "update.learning_rat", "learning_rate"),
            (("rewards.0.reward=psnr", "rewards.0.name=p"), {}, "rewards.0", "weights alone"),
            (("advantages.kl_coef=0.1",), {}, "advantages.kl_coef", "no log-probs of the reference"),
            (("rewards.0.weight=3.0",), {"advantages": "stored"}, "--advantages", "recomputed"),
            (("policy.lora.rank=8",), {"policy": 1, "iterations": "2"}, "policy.lora", "--policy 0"),
        ],
    )
    def test_told_with_the_place_and_the_mend(
        self, finished: Runs, overrides: tuple[str, ...], options: Mapping[str, Any], place: str, hint: str
    ) -> None:
        (error,) = refused(finished, *overrides, **options)
        assert error.place == place
        assert hint in error.hint

    def test_another_model_than_the_source_began_with(self, finished: Runs) -> None:
        described = load_checked(finished.path("run.json").read_bytes())
        finished.path("run.json").write_bytes(dump_checked({**described, "model_digest": "0" * 64}))
        (error,) = refused(finished)
        assert error.place == "policy.model"
        assert "000000000000" in error.hint
        finished.path("run.json").write_text("{")
        (error,) = refused(finished)
        assert error.place == "run/run.json"

    def test_rollouts_of_another_schema_version(self, finished: Runs) -> None:
        manifest = finished.path("iteration_000001/rollouts.manifest.json")
        manifest.write_bytes(dump_checked(load_checked(manifest.read_bytes()) | {"schema_version": 1}))
        (error,) = refused(finished)
        assert (error.place, error.value) == ("run/iteration_000001/rollouts", "schema version 1")

    def test_another_training_run_is_not_written_over(self, finished: Runs) -> None:
        shutil.copytree(finished.path(), finished.path(run="other"))
        before = content(finished.path(run="other"))
        (error,) = refused(finished, name="other")
        assert (error.place, error.value) == ("--run", "other")
        assert content(finished.path(run="other")) == before


class TestCommand:
    def test_its_default_bound_is_that_of_a_request(self) -> None:
        assert inspect.signature(command).parameters["max_staleness"].default == MAX_STALENESS

    def test_one_object_on_the_last_line(self, finished: Runs) -> None:
        arguments = ["replay", "run", "--root", str(finished.root), "--iterations", "1-2", "--run", "again", "--json"]
        result = CliRunner().invoke(application, arguments)
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout.splitlines()[-1])
        assert told["policy_digest"] == policy_digest(finished, 2)
        assert (told["run"], told["source"], told["iterations"]) == ("again", "run", 2)
        assert math.isfinite(told["reward_last"])
        assert told["seconds"]["rollouts"] == 0.0

    def test_wrong_input_ends_with_2(self, finished: Runs) -> None:
        arguments = ["replay", "run", "--root", str(finished.root), "--max-staleness", "0", "--iterations", "2"]
        result = CliRunner().invoke(application, arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: --max-staleness: got 0. No row would be left")


def test_no_file_of_a_replay_names_the_machine(finished: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    (finished.root.parent / "data").symlink_to(REPOSITORY / "data")
    monkeypatch.chdir(finished.root.parent)
    for source in ("run", "runs/run", "runs/run/"):
        assert root_of(source, "runs", ArtifactStore("runs", "run")) == "runs"
    config = finished.path("config.yaml")
    config.write_text(config.read_text().replace(str(finished.root), "runs"))
    asyncio.run(replay(plan_replay(ReplayRequest("runs/run", iterations="1"))))
    written = [path for path in finished.path(run="run-replay").rglob("*") if path.is_file()]
    assert len(written) > 8
    assert [path for path in written if str(finished.root.parent).encode() in path.read_bytes()] == []


def test_a_root_may_be_any_url(server: None, undisturbed: tuple[Runs, Start]) -> None:
    memory = fsspec.filesystem("memory")
    try:
        runs = Runs(Path("unused"))
        first = runs.start(storage__root="memory://bucket/runs", run__iterations=1)
        plan = plan_replay(ReplayRequest("memory://bucket/runs/run"))
        assert plan.config.storage.root == "memory://bucket/runs"
        assert asyncio.run(replay(plan)).policy_digest == first.summary.policy_digest
    finally:
        if memory.exists("/bucket"):
            memory.rm("/bucket", recursive=True)
