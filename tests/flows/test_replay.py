"""Learning from stored rollouts: what is reproduced, what is corrected, what is left out, and what is refused."""

import asyncio
import contextvars
import hashlib
import inspect
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from flows.command_line import application
from flows.command_line import replay as command
from flows.inspection import inspect_run
from flows.replay import ReplaySummary, replay
from flows.replay_request import MAX_STALENESS, ReplayRequest, plan_replay, root_of
from grpo_core.errors import InputError, InputErrors
from grpo_core.optimizer import PolicyOptimizer
from grpo_core.parity import ParityError
from tasks.progress import listen
from tasks.storage.manifest import opened, sealed
from tasks.storage.reference import ArtifactRef
from tasks.storage.store import ArtifactStore

from .conftest import REPOSITORY, Heard, Runs, Start

UPDATES = ("iteration 1: update policy", "iteration 2: update policy")
ADVANTAGES = ("iteration 1: compute advantages", "iteration 2: compute advantages")


def run_replay(runs: Runs, *overrides: str, **options: Any) -> tuple[ReplaySummary, Heard]:
    """Replay the run in this process: its summary, and what was heard of it."""
    plan = plan_replay(ReplayRequest(source="run", root=str(runs.root), overrides=overrides, **options))
    heard = Heard([], [])

    def body() -> ReplaySummary:
        listen(heard)
        return asyncio.run(replay(plan))

    return contextvars.copy_context().run(body), heard


def refused(runs: Runs, *overrides: str, **options: Any) -> tuple[InputError, ...]:
    """The problems of a replay that must not begin."""
    request = ReplayRequest(**{"source": "run", "root": str(runs.root), **options}, overrides=overrides)
    with pytest.raises((InputError, InputErrors)) as caught:
        plan_replay(request)
    assert not runs.path(run="run-replay").exists()
    return caught.value.errors if isinstance(caught.value, InputErrors) else (caught.value,)


def content(folder: Path) -> dict[str, str]:
    """sha256 of every file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def metrics(runs: Runs, iteration: int, run: str = "run-replay") -> dict[str, float]:
    table = pl.read_parquet(runs.path(f"iteration_{iteration:06d}/metrics.parquet", run=run))
    return dict(zip(table["metric"], table["value"], strict=True))


def policy_digest(runs: Runs, version: int, run: str = "run") -> str:
    state = json.loads(runs.path(f"policies/{version:06d}/training_state.json", run=run).read_text())
    return str(state["policy_digest"])


def advantages(runs: Runs, iteration: int, run: str = "run-replay") -> pl.DataFrame:
    return pl.read_parquet(runs.path(f"iteration_{iteration:06d}/advantages/advantages.parquet", run=run))


def rewrite(
    runs: Runs, folder: str, change: Callable[[pl.DataFrame], pl.DataFrame], *, to: str | None = None
) -> ArtifactRef:
    """Commit a changed copy of an artifact of the source, in its place or in another one."""
    store = ArtifactStore(str(runs.root), "run")
    former = store.find(folder)
    assert former is not None
    with store.staging() as staged:
        for path in sorted(store.local_files(former).glob("*.parquet")):
            schema = pq.read_schema(path)
            table = change(pl.DataFrame(pl.from_arrow(pq.read_table(path)))).to_arrow()
            columns = [table[name].combine_chunks().cast(schema.field(name).type) for name in schema.names]
            pq.write_table(pa.table(columns, schema=schema), staged / path.name)
        digest = hashlib.sha256(f"{former.digest} {to} {content(staged)}".encode()).hexdigest()
        fields = former.model_dump(exclude={"uri", "sha256", "digest"})
        return store.commit(staged, to or folder, digest=digest, **fields)


def of_first_group(table: pl.DataFrame) -> pl.Expr:
    return pl.col("group_id") == table["group_id"][0]


class TestSameSettings:
    def test_the_source_is_reproduced_to_the_bit_and_stays_as_it_is(
        self, finished: Runs, undisturbed: tuple[Runs, Start]
    ) -> None:
        before = content(finished.path())
        summary, heard = run_replay(finished)
        assert summary.policy_digest == undisturbed[1].summary.policy_digest
        assert policy_digest(finished, 1, "run-replay") == policy_digest(finished, 1)
        assert tuple(heard.stages) == UPDATES
        assert content(finished.path()) == before
        for iteration in (1, 2):
            assert advantages(finished, iteration).equals(advantages(finished, iteration, "run"))
        assert (summary.source, summary.source_iterations, summary.advantages) == ("run", [1, 2], "stored")
        assert (summary.staleness, summary.rows_left_out, summary.iterations) == (0, 0, 2)

    def test_from_a_later_version_with_its_optimizer(self, finished: Runs) -> None:
        summary, heard = run_replay(finished, policy=1, iterations="2")
        assert tuple(heard.stages) == UPDATES[1:]
        assert summary.policy_digest == policy_digest(finished, 2)
        assert not finished.path("policies/000001", run="run-replay").exists()

    def test_nothing_is_done_again(self, finished: Runs) -> None:
        first, _ = run_replay(finished, iterations="1")
        longer, heard = run_replay(finished)
        assert tuple(heard.stages) == UPDATES[1:]
        again, heard = run_replay(finished)
        assert heard.stages == []
        assert again.policy_digest == longer.policy_digest != first.policy_digest

    def test_a_replay_that_was_stopped_or_damaged_goes_on_to_the_same_policy(
        self, finished: Runs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole, _ = run_replay(finished, "rewards.0.weight=2.0", name="whole")
        real = PolicyOptimizer.step

        def step_and_fail(self: PolicyOptimizer) -> None:
            real(self)
            if self.steps == 3:
                raise RuntimeError("power cut")

        shutil.rmtree(finished.root / ".stages")
        shutil.rmtree(finished.path(run="whole"))
        monkeypatch.setattr(PolicyOptimizer, "step", step_and_fail)
        with pytest.raises(RuntimeError, match="power cut"):
            run_replay(finished, "rewards.0.weight=2.0", name="whole")
        monkeypatch.undo()
        monkeypatch.chdir(REPOSITORY)
        again, heard = run_replay(finished, "rewards.0.weight=2.0", name="whole")
        assert tuple(heard.stages) == UPDATES[1:]
        assert again.policy_digest == whole.policy_digest
        finished.path("policies/000001/adapter_model.safetensors", run="whole").write_bytes(b"damaged")
        again, heard = run_replay(finished, "rewards.0.weight=2.0", name="whole")
        assert tuple(heard.stages) == UPDATES[:1]
        assert again.policy_digest == whole.policy_digest


class TestAdvantages:
    def test_another_weight_changes_the_policy_and_nothing_is_sampled_or_scored(self, finished: Runs) -> None:
        summary, heard = run_replay(finished, "rewards.1.weight=-3.0")
        assert tuple(heard.stages) == (ADVANTAGES[0], UPDATES[0], ADVANTAGES[1], UPDATES[1])
        assert summary.advantages == "recomputed"
        assert summary.policy_digest != policy_digest(finished, 2)
        for iteration in (1, 2):
            place = f"iteration_{iteration:06d}"
            assert {path.name for path in finished.path(place, run="run-replay").iterdir()} == {
                "advantages",
                "advantages.manifest.json",
                "metrics.parquet",
            }
            scores = [
                pl.read_parquet(finished.path(place, "rewards", name, "scores.parquet"))["value"]
                for name in ("ssim", "psnr")
            ]
            mixed = [0.5 * ssim - 3.0 * psnr for ssim, psnr in zip(*scores, strict=True)]
            assert advantages(finished, iteration)["reward"].to_list() == pytest.approx(mixed, rel=1e-6)

    def test_a_rescoring_of_the_source(self, finished: Runs) -> None:
        def turned(table: pl.DataFrame) -> pl.DataFrame:
            return table.with_columns(pl.col("advantage") * -1.0)

        for number in (1, 2):
            place = f"iteration_{number:06d}/advantages"
            rewrite(finished, place, lambda table: table, to=f"rescored/same/{place}")
            rewrite(finished, place, turned, to=f"rescored/turned/{place}")
        same, _ = run_replay(finished, advantages="same", name="same")
        turned_round, _ = run_replay(finished, advantages="turned", name="turned")
        assert same.policy_digest == policy_digest(finished, 2) != turned_round.policy_digest
        assert advantages(finished, 1, "turned")["advantage"].to_list() == [
            -value for value in advantages(finished, 1, "run")["advantage"]
        ]

    def test_iterations_of_other_numbers_keep_their_tables_where_they_are_used(self, finished: Runs) -> None:
        for overrides in ((), ("rewards.1.weight=-3.0",)):
            run_replay(finished, *overrides, name="both")
            run_replay(finished, *overrides, name="second", iterations="2")
            assert advantages(finished, 1, "second").equals(advantages(finished, 2, "both"))
            assert not finished.path("iteration_000002", run="second").exists()


class TestCorrection:
    def test_rows_of_other_weights_count_by_their_ratio(self, finished: Runs) -> None:
        # Iteration 2 was sampled by version 1; the model as it was given learns from it.
        summary, heard = run_replay(finished, iterations="2")
        assert (summary.staleness, summary.rows_left_out) == (1, 0)
        assert "truncated at 3" in heard.lines[0]
        told = metrics(finished, 1)
        assert (told["staleness/mean"], told["staleness/max"]) == (1.0, 1.0)
        assert told["mismatch/mean_weight"] != 1.0
        assert told["sampling/sampling_logp_difference/max"] > 1e-2
        named = "update.mismatch={mode: truncate, level: token, cap: 3.0}"
        same, _ = run_replay(finished, named, iterations="2", name="named")
        assert same.policy_digest == summary.policy_digest

    def test_the_gradient_is_the_weight_times_the_uncorrected_one(self, finished: Runs) -> None:
        # As if the sampler had found each token far less likely: every ratio is beyond the cap, which is the weight
        # then, and the first gradient is proportional to it.
        def unlikely(table: pl.DataFrame) -> pl.DataFrame:
            return table.with_columns(pl.col("rollout_logprobs").list.eval(pl.element() - 20.0))

        rewrite(finished, "iteration_000002/rollouts", unlikely)
        norms = []
        for cap in (2.0, 6.0):
            sets = ("update.kl_coef=0.0", f"update.mismatch={{mode: truncate, level: token, cap: {cap}}}")
            run_replay(finished, *sets, iterations="2", name=f"cap{cap}")
            steps = pl.read_parquet(finished.path("policies/000001/update_steps.parquet", run=f"cap{cap}"))
            assert metrics(finished, 1, f"cap{cap}")["mismatch/mean_weight"] == pytest.approx(cap)
            norms.append(steps["grad_norm"][0])
        assert norms[1] / norms[0] == pytest.approx(3.0, rel=1e-4)

    def test_own_rows_need_none_and_pass_the_gate(self, finished: Runs) -> None:
        run_replay(finished, iterations="1")
        told = metrics(finished, 1)
        assert told["mismatch/mean_weight"] == 1.0
        assert "staleness/max" not in told
        tight = 'update.parity={"max_difference": 1e-12, "mean_difference": 1e-12}'
        with pytest.raises(ParityError):
            run_replay(finished, tight, iterations="1", name="tight")
        run_replay(finished, tight, iterations="2", name="others")


class TestStaleness:
    def test_rows_beyond_the_bound_are_left_out_and_counted(self, finished: Runs) -> None:
        alone = Runs(finished.root.parent / "alone")
        shutil.copytree(finished.root, alone.root)

        def from_afar(table: pl.DataFrame) -> pl.DataFrame:
            far = of_first_group(table)
            return table.with_columns(
                pl.when(far).then(7).otherwise("policy_version").alias("policy_version"),
                pl.when(far).then(pl.lit("0" * 64)).otherwise("policy_digest").alias("policy_digest"),
            )

        def without(table: pl.DataFrame) -> pl.DataFrame:
            return table.with_columns(
                pl.when(of_first_group(table)).then(None).otherwise("advantage").alias("advantage")
            )

        rewrite(finished, "iteration_000001/rollouts", from_afar)
        rewrite(alone, "iteration_000001/advantages", without)
        summary, _ = run_replay(finished, "update.mismatch.mode=mask", iterations="1", max_staleness=6)
        assert (summary.staleness, summary.rows_left_out) == (0, 2)
        assert metrics(finished, 1)["rows_left_out"] == 2.0
        # The rows that are left are those that have an advantage in the other run, and so is the policy.
        expected, _ = run_replay(alone, "update.mismatch.mode=mask", iterations="1")
        assert expected.rows_left_out == 0
        assert summary.policy_digest == expected.policy_digest
        far, _ = run_replay(finished, "update.mismatch.mode=mask", iterations="1", max_staleness=7, name="far")
        assert (far.staleness, far.rows_left_out) == (7, 0)
        assert far.policy_digest != summary.policy_digest

    def test_a_bound_that_leaves_nothing_is_refused_before_anything_is_done(self, finished: Runs) -> None:
        (error,) = refused(finished, iterations="2", max_staleness=0)
        assert (error.place, error.value) == ("--max-staleness", 0)
        assert "iteration 2 were sampled by version 1, and version 0 is trained on them. Allow 1" in error.mend
        (error,) = refused(finished, iterations="1", policy=2, max_staleness=1)
        assert "Allow 2" in error.mend

    def test_none_at_all_allows_own_rows_alone(self, finished: Runs) -> None:
        summary, _ = run_replay(finished, max_staleness=0)
        assert summary.policy_digest == policy_digest(finished, 2)
        # With another learning rate, version 1 is another policy than the one that sampled the second iteration.
        with pytest.raises(InputError, match=r"--max-staleness: got 0\. No row is left: iteration 2"):
            run_replay(finished, "update.learning_rate=1e-4", max_staleness=0, name="other")
        assert finished.path("policies/000001.manifest.json", run="other").is_file()
        corrected, _ = run_replay(finished, "update.learning_rate=1e-4", max_staleness=1, name="other")
        assert corrected.iterations == 2


class TestEvaluation:
    def test_held_out_prompts_are_sampled_as_in_training(self, finished: Runs) -> None:
        held_out = (
            "evaluate.prompts=data/prompts/shapes_heldout.jsonl",
            "evaluate.targets=data/targets",
            "evaluate.target_column=target",
            "evaluate.limit=1",
            "evaluate.samples_per_prompt=2",
        )
        summary, heard = run_replay(finished, *held_out)
        sampled = [stage for stage in heard.stages if "collect rollouts" in stage]
        assert sampled == [f"evaluation of policy {version}: collect rollouts" for version in (0, 2)]
        assert summary.heldout_before is not None
        assert summary.heldout_after is not None
        assert summary.policy_digest == policy_digest(finished, 2)

    def test_inspection_shows_a_replay(self, finished: Runs) -> None:
        summary, _ = run_replay(finished)
        shown = inspect_run("run-replay", root=str(finished.root)).summary(None)
        assert (shown.policy_digest, shown.iterations, shown.warnings) == (summary.policy_digest, 2, [])
        assert (shown.reward_first, shown.reward_last) == (summary.reward_first, summary.reward_last)


class TestBadInput:
    def test_no_such_run(self, finished: Runs) -> None:
        (error,) = refused(finished, source="rum")
        assert error.place == "RUN"
        assert "run" in error.mend

    def test_no_stored_rollouts(self, finished: Runs) -> None:
        for name in ("iteration_000001", "iteration_000002"):
            shutil.rmtree(finished.path(name))
        (error,) = refused(finished)
        assert "no iteration with stored rollouts" in error.mend

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
        with pytest.raises(InputErrors, match="no whole iteration 2; whole are 1 to 1"):
            plan_replay(ReplayRequest("run", str(finished.root), iterations="1-2"))

    @pytest.mark.parametrize("text", ["0", "2-1", "a", "1-", "1,2", ""])
    def test_iterations_that_are_no_range(self, finished: Runs, text: str) -> None:
        (error,) = refused(finished, iterations=text)
        assert (error.place, error.value) == ("--iterations", text)

    @pytest.mark.parametrize(
        ("overrides", "options", "place", "mend"),
        [
            ((), {"advantages": "storde"}, "--advantages", "Nearest: stored"),
            ((), {"policy": 9}, "--policy", "run holds versions 1, 2"),
            ((), {"policy": -1}, "--policy", "0 or more"),
            ((), {"max_staleness": -1}, "--max-staleness", "0 or more"),
            ((), {"iterations": "2-3"}, "--iterations", "no whole iteration 3; whole are 1 to 2"),
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
        self, finished: Runs, overrides: tuple[str, ...], options: Mapping[str, Any], place: str, mend: str
    ) -> None:
        (error,) = refused(finished, *overrides, **options)
        assert error.place == place
        assert mend in error.mend

    def test_another_model_than_the_source_began_with(self, finished: Runs) -> None:
        described = json.loads(finished.path("run.json").read_text())
        finished.path("run.json").write_text(json.dumps({**described, "model_digest": "0" * 64}))
        (error,) = refused(finished)
        assert error.place == "policy.model"
        assert "000000000000" in error.mend
        finished.path("run.json").write_text("{")
        (error,) = refused(finished)
        assert error.place == "run/run.json"

    def test_rollouts_of_another_schema_version(self, finished: Runs) -> None:
        manifest = finished.path("iteration_000001/rollouts.manifest.json")
        manifest.write_bytes(sealed(opened(manifest.read_bytes()) | {"schema_version": 1}))
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
