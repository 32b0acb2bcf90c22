"""A replay as it is requested: by the program, from any root, and refused when it cannot be done."""

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import fsspec
import pytest
from typer.testing import CliRunner

from configs.loader import read_config
from flows.command_line.main import application
from flows.export.plan import plan_export
from flows.replaying import correction_problems, plan_replay, replay, root_of
from flows.requests import ExportRequest, ReplayRequest
from grpo_core.errors import InputError
from tasks.runs.stored import locate_paths, portable
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import dump_checked, load_checked
from tests.flows.conftest import REPOSITORY, Runs, Start, heard_of, refused, sha256_of
from tests.flows.replaying.test_replaying import request_replay, run_replay


def problem(runs: Runs, *overrides: str, **options: Any) -> InputError:
    """The one problem of a replay that must not begin."""
    (error,) = refused(lambda: plan_replay(request_replay(runs, *overrides, **options)))
    assert not runs.path(run="run-replay").exists()
    return error


def without_rollouts(runs: Runs) -> None:
    for name in ("iteration_000001", "iteration_000002"):
        shutil.rmtree(runs.path(name))


def truncated(runs: Runs) -> None:
    path = runs.path("iteration_000002/rollouts/part-00000.parquet")
    path.write_bytes(path.read_bytes()[:-1])


def described(**changes: object) -> Callable[[Runs], object]:
    """Change what run.json says."""

    def change(runs: Runs) -> None:
        path = runs.path("run.json")
        path.write_bytes(dump_checked({**load_checked(path.read_bytes()), **changes}))

    return change


WRONG: list[tuple[tuple[str, ...], dict[str, Any], str, object]] = [
    ((), {"source": "rum"}, "RUN", "rum"),
    *(((), {"advantages": name}, "--advantages", name) for name in ("storde", "../up")),
    ((), {"source": "run@9"}, "RUN", "run@9"),
    ((), {"source": "run@-1"}, "RUN", "run@-1"),
    ((), {"source": "run@best"}, "RUN", "run@best"),
    ((), {"max_staleness": -1}, "max_staleness", -1),
    ((), {"max_staleness": 0, "iterations": "2"}, "--max-staleness", 0),
    ((), {"max_staleness": 1, "iterations": "1", "source": "run@2"}, "--max-staleness", 1),
    *(((), {"iterations": text}, "--iterations", text) for text in ("2-3", "0", "2-1", "a", "1-", "1,2", "")),
    ((), {"name": "run"}, "--run", "run"),
    *(
        ((override,), {}, "--set", override)
        for override in (
            *("data.limit=3", "storage.root=elsewhere", "run.iterations=3", "policy.kind=diffusers"),
            *("run.staleness=1", "advantages.max_rounds=2", "~policy.train"),
        )
    ),
    (("update.algorithm=nft",), {}, "update.algorithm", "nft"),
    (("update.mismatch.mode=none",), {}, "update.mismatch.mode", "none"),
    (("update.learning_rat=1",), {}, "update.learning_rat", "learning_rat"),
    (("rollout.num_generations=3",), {}, "rollout.group_size", 3),
    (("rewards.0.reward=psnr", "rewards.0.name=p"), {}, "rewards.0", "p"),
    (("advantages.kl_coef=0.1",), {}, "advantages.kl_coef", 0.1),
    (("rewards.0.weight=3.0",), {"advantages": "stored"}, "--advantages", "stored"),
    (("policy.lora.rank=8",), {"source": "run@1", "iterations": "2"}, "policy.lora", ANY),
]


class TestBadInput:
    @pytest.mark.parametrize(
        ("damage", "place"),
        [
            (without_rollouts, "RUN"),
            (truncated, "run/iteration_000002/rollouts"),
            (described(model_digest="0" * 64), "policy.model"),
            (described(schema_version=1), "run/run.json"),
            (lambda runs: runs.path("run.json").write_text("{"), "run/run.json"),
        ],
    )
    def test_an_unusable_source_is_named_and_left_alone(
        self, finished: Runs, damage: Callable[[Runs], object], place: str
    ) -> None:
        damage(finished)
        before = sha256_of(finished.path())
        assert problem(finished).place == place
        assert sha256_of(finished.path()) == before

    def test_a_replay_has_nothing_to_replay(self, finished: Runs) -> None:
        run_replay(finished, iterations="1")
        first, *_ = refused(lambda: plan_replay(request_replay(finished, source="run-replay")))
        assert first.place == "run-replay/iteration_000001/rollouts"

    def test_an_unfinished_iteration_is_left_out(self, finished: Runs) -> None:
        finished.path("iteration_000002/advantages.manifest.json").unlink()
        assert problem(finished, iterations="1-2").place == "--iterations"
        assert [each.number for each in plan_replay(request_replay(finished)).iterations] == [1]

    def test_each_mistake_has_its_place_and_value(self, undisturbed: tuple[Runs, Start]) -> None:
        for overrides, options, place, value in WRONG:
            error = problem(undisturbed[0], *overrides, **options)
            assert (error.place, error.value) == (place, value), (overrides, options)

    @pytest.mark.parametrize(
        ("overrides", "refused_at"),
        [
            (["update.denoising.mismatch.mode=none"], "update.denoising.mismatch.mode"),
            (["update.denoising.mismatch={cap: 1.005}"], "update.denoising.mismatch.mode"),
            (["update.tokens.vllm_importance_sampling_clip_max=2.0"], "update.tokens.mismatch.mode"),
            (["update.denoising.mismatch.mode=mask", "update.denoising.mismatch.cap=1.005"], None),
            (["update.denoising.learning_rate=1e-5"], None),
        ],
    )
    def test_a_correction_that_is_set_is_never_replaced(self, overrides: list[str], refused_at: str | None) -> None:
        config = read_config(REPOSITORY / "configs" / "tiny_both.yaml", overrides)
        places = [error.place for error in correction_problems(overrides, config)]
        assert places == ([refused_at] if refused_at else [])

    def test_another_training_run_is_not_overwritten(self, finished: Runs) -> None:
        shutil.copytree(finished.path(), finished.path(run="other"))
        before = sha256_of(finished.path(run="other"))
        error = problem(finished, name="other")
        assert (error.place, error.value) == ("--run", "other")
        assert sha256_of(finished.path(run="other")) == before


def test_the_command_prints_one_object_on_the_last_line(finished: Runs) -> None:
    arguments = ["replay", "run", "--root", str(finished.root), "--iterations", "1", "--run", "again", "--json"]
    result = CliRunner().invoke(application, arguments)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["policy_digest"] == finished.policy_digest(1)
    assert (summary["run"], summary["source"], summary["iterations"]) == ("again", "run", 1)
    assert math.isfinite(summary["reward_last"])
    assert summary["seconds"]["rollouts"] == 0.0


def test_relative_paths_of_the_source_lead_from_any_folder(finished: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the stored configuration has are found beside the storage root, and make no other run of a replay."""
    base = finished.root.parent
    (base / "data").symlink_to(REPOSITORY / "data")
    monkeypatch.chdir(base)
    for source in ("run", "runs/run", "runs/run/"):
        assert root_of(source, "runs", ArtifactStore("runs", "run")) == "runs"
    request = ReplayRequest(source=str(finished.path()), iterations="1")
    first = asyncio.run(replay(request))
    (base / "elsewhere").mkdir()
    monkeypatch.chdir(base / "elsewhere")
    again, heard = heard_of(lambda: asyncio.run(replay(request)))
    assert (again.policy_digest, heard.stages) == (first.policy_digest, [])
    exported = ExportRequest(run=str(finished.path()), folder="exported", merged=True)
    assert plan_export(exported).base is not None
    values = {"policy": {"model": "m" * 5000}, "data": {"prompts": "none/at\0all"}, "update": {"loss": "grpo"}}
    (base / "grpo").mkdir()
    found = deepcopy(values)
    locate_paths(found, ArtifactStore(str(finished.root), "run"))
    assert found == values
    (base / "data").unlink()
    model = "data/models/tiny-glm-image"
    problems = {problem.place: problem.hint for problem in refused(lambda: plan_replay(request))}
    hint = problems["run/config.yaml, policy.model"]
    assert str(base / model) in hint
    assert "--set policy.model=PATH" in hint
    assert "--set" not in problems["run/config.yaml, data.prompts"]
    there = exported.model_copy(update={"overrides": (f"policy.model={REPOSITORY / model}",)})
    assert plan_export(there).base == REPOSITORY / model
    other = exported.model_copy(update={"overrides": (f"policy.model={REPOSITORY}/data/models/tiny-text",)})
    assert [problem.place for problem in refused(lambda: plan_export(other))] == ["policy.model"]


def test_paths_of_a_run_lead_from_where_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root out/runs is two folders below; absolute paths become relative where the root leads to their folder."""
    (tmp_path / "before" / "out" / "runs").mkdir(parents=True)
    (tmp_path / "before" / "reward.py").touch()
    monkeypatch.chdir(tmp_path / "before")
    given = {"function": f"{Path.cwd()}/reward.py:score", "model": str(tmp_path / "model")}
    for elsewhere in (str(tmp_path / "runs"), "../runs", "~/runs", "s3://bucket/runs"):
        assert portable({**given, "storage": {"root": elsewhere}})["function"] == given["function"]
    beside = {"root": f"{Path.cwd()}/runs"}
    assert portable({**given, "storage": beside})["function"] == "reward.py:score"
    stored = portable({**given, "storage": {"root": "out/runs"}})
    assert (stored["function"], stored["model"]) == ("reward.py:score", str(tmp_path / "model"))
    (tmp_path / "before").rename(tmp_path / "after")
    monkeypatch.chdir(tmp_path)
    locate_paths(stored, ArtifactStore("after/out/runs", "run"))
    assert stored["function"] == "after/reward.py:score"


@pytest.mark.slow
def test_a_root_may_be_any_url(undisturbed: tuple[Runs, Start]) -> None:
    memory = fsspec.filesystem("memory")
    try:
        settings = {"storage__root": "memory://bucket/runs", "run__iterations": 1}
        runs = Runs(Path("unused"))
        first = runs.start(**settings)
        assert first.summary.policy_digest == undisturbed[0].policy_digest(1)
        assert runs.start(**settings).stages == ()
        request = ReplayRequest(source="memory://bucket/runs/run")
        assert plan_replay(request).config.storage.root == "memory://bucket/runs"
        assert asyncio.run(replay(request)).policy_digest == first.summary.policy_digest
    finally:
        if memory.exists("/bucket"):
            memory.rm("/bucket", recursive=True)
