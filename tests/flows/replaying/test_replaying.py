"""Learning from stored rollouts: what is reproduced, what is corrected, and what is left out."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.validation import validated
from flows.inspect_run import inspect_run
from flows.replaying import ReplaySummary, replay
from flows.requests import ReplayRequest
from flows.training import history
from grpo_core.parity import ParityError
from grpo_core.update.optimizer import PolicyOptimizer
from tasks.runs.layout import IMAGES
from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import EVALUATED, Heard, Runs, Start, heard_of, refused, sha256_of

UPDATES = ("iteration 1: update policy", "iteration 2: update policy")


def request_replay(runs: Runs, *overrides: str, **options: Any) -> ReplayRequest:
    values = {"source": "run", "root": str(runs.root), "overrides": list(overrides), **options}
    return validated(ReplayRequest, values)


def run_replay(runs: Runs, *overrides: str, **options: Any) -> tuple[ReplaySummary, Heard]:
    """Replay the run in this process: its summary, and what was heard of it."""
    return heard_of(lambda: asyncio.run(replay(request_replay(runs, *overrides, **options))))


def advantages(runs: Runs, iteration: int, run: str = "run-replay") -> pl.DataFrame:
    return pl.read_parquet(runs.path(f"iteration_{iteration:06d}/advantages/advantages.parquet", run=run))


def rewrite(
    runs: Runs, folder: str, change: Callable[[pl.DataFrame], pl.DataFrame], *, to: str | None = None
) -> ArtifactRef:
    """Commit a changed copy of an artifact of the source, in its place or in another one."""
    store = ArtifactStore(str(runs.root), "run")
    previous = store.find(folder)
    assert previous is not None
    with store.staging() as staged:
        for path in sorted(store.local_files(previous).glob("*.parquet")):
            if path.match(IMAGES):
                shutil.copyfile(path, staged / path.name)
                continue
            schema = pq.read_schema(path)
            table = change(pl.DataFrame(pl.from_arrow(pq.read_table(path)))).to_arrow()
            columns = [table[name].combine_chunks().cast(schema.field(name).type) for name in schema.names]
            pq.write_table(pa.table(columns, schema=schema), staged / path.name)
        digest = hashlib.sha256(f"{previous.digest} {to} {sha256_of(staged)}".encode()).hexdigest()
        fields = previous.model_dump(exclude={"uri", "sha256", "digest"})
        return commit_artifact(store, staged, to or folder, digest=digest, **fields)


def of_first_group(table: pl.DataFrame) -> pl.Expr:
    return pl.col("group_id") == table["group_id"][0]


class TestSameSettings:
    def test_the_source_is_reproduced_to_the_bit_and_stays_as_it_is(
        self, finished: Runs, undisturbed: tuple[Runs, Start]
    ) -> None:
        before = sha256_of(finished.path())
        summary, heard = run_replay(finished)
        assert summary.policy_digest == undisturbed[1].summary.policy_digest
        assert finished.policy_digest(1, "run-replay") == finished.policy_digest(1)
        assert tuple(heard.stages) == UPDATES
        assert sha256_of(finished.path()) == before
        for iteration in (1, 2):
            assert advantages(finished, iteration).equals(advantages(finished, iteration, "run"))
        assert (summary.source, summary.source_iterations, summary.advantages) == ("run", [1, 2], "stored")
        assert (summary.staleness, summary.rows_left_out, summary.iterations) == (0, 0, 2)
        shown = inspect_run("run-replay", root=str(finished.root)).summary(None)
        assert (shown.policy_digest, shown.iterations, shown.warnings) == (summary.policy_digest, 2, [])
        assert (shown.reward_first, shown.reward_last) == (summary.reward_first, summary.reward_last)
        again, heard = run_replay(finished)
        assert (again.policy_digest, heard.stages) == (summary.policy_digest, [])

    def test_from_a_later_version_its_first_evaluation_reaches_trackers_and_each_is_announced_once(
        self, finished: Runs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        announced: list[int] = []
        monkeypatch.setattr(history, "emit_evaluated", lambda run, policy, done: announced.append(policy.version))
        evaluated = {**EVALUATED, "evaluate__every": 1, "run__trackers": ["tensorboard"]}
        overrides = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in evaluated.items()]
        for updates in ([UPDATES[1]], []):
            summary, heard = run_replay(finished, *overrides, source="run@1", iterations="2")
            # With the optimizer of the version that it starts from.
            assert summary.policy_digest == finished.policy_digest(2)
            assert [stage for stage in heard.stages if stage in UPDATES] == updates
            assert announced == [1, 2]
        assert not finished.path("policies/000001", run="run-replay").exists()
        logged = EventAccumulator(str(next(finished.path("tensorboard", run="run-replay").rglob("events*")).parent))
        logged.Reload()
        assert [event.step for event in logged.Scalars("heldout_reward")] == [1, 2]

    @pytest.mark.slow
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
        again, heard = run_replay(finished, "rewards.0.weight=2.0", name="whole")
        assert tuple(heard.stages) == UPDATES[1:]
        assert again.policy_digest == whole.policy_digest
        finished.path("policies/000001/tokens/adapter_model.safetensors", run="whole").write_bytes(b"damaged")
        again, heard = run_replay(finished, "rewards.0.weight=2.0", name="whole")
        assert tuple(heard.stages) == UPDATES[:1]
        assert again.policy_digest == whole.policy_digest


class TestAdvantages:
    def test_another_weight_changes_the_policy_and_nothing_is_sampled_or_scored(self, finished: Runs) -> None:
        summary, heard = run_replay(finished, "rewards.1.weight=-3.0", iterations="1")
        assert tuple(heard.stages) == ("iteration 1: compute advantages", UPDATES[0])
        assert summary.advantages == "recomputed"
        assert summary.policy_digest != finished.policy_digest(1)
        place = "iteration_000001"
        made = {path.name for path in finished.path(place, run="run-replay").iterdir()}
        assert made == {"advantages", "advantages.manifest.json", "metrics.parquet"}
        ssim, psnr = (
            pl.read_parquet(finished.path(place, "rewards", name, "scores.parquet"))["value"]
            for name in ("ssim", "psnr")
        )
        mixed = (0.5 * ssim - 3.0 * psnr).to_list()
        assert advantages(finished, 1)["reward"].to_list() == pytest.approx(mixed, rel=1e-6)

    @pytest.mark.slow
    def test_iterations_of_other_numbers_keep_their_tables_where_they_are_used(self, finished: Runs) -> None:
        for overrides in ((), ("rewards.1.weight=-3.0",)):
            again = ("run.on_change=restart", *overrides)
            run_replay(finished, *again, name="both")
            run_replay(finished, *again, name="second", iterations="2")
            assert advantages(finished, 1, "second").equals(advantages(finished, 2, "both"))
            assert not finished.path("iteration_000002", run="second").exists()


class TestCorrection:
    def test_rows_of_other_weights_count_by_their_ratio(self, finished: Runs) -> None:
        # Iteration 2 was sampled by version 1; the model as it was given learns from it.
        summary, _ = run_replay(finished, iterations="2")
        assert (summary.staleness, summary.rows_left_out) == (1, 0)
        told = finished.metrics(1, "run-replay")
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
            assert finished.metrics(1, f"cap{cap}")["mismatch/mean_weight"] == pytest.approx(cap)
            norms.append(finished.steps(1, f"cap{cap}")["grad_norm"][0])
        assert norms[1] / norms[0] == pytest.approx(3.0, rel=1e-4)

    @pytest.mark.slow
    def test_own_rows_need_none_and_pass_the_gate(self, finished: Runs) -> None:
        run_replay(finished, iterations="1")
        told = finished.metrics(1, "run-replay")
        assert told["mismatch/mean_weight"] == 1.0
        assert "staleness/max" not in told
        tight = 'update.parity={"max_difference": 1e-12, "mean_difference": 1e-12}'
        with pytest.raises(ParityError):
            run_replay(finished, tight, iterations="1", name="tight")
        run_replay(finished, tight, iterations="2", name="others")


class TestStaleness:
    def test_rows_beyond_the_bound_are_left_out_and_counted(self, finished: Runs) -> None:
        alone = finished.copied_to(finished.root.parent / "alone")

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
        assert finished.metrics(1, "run-replay")["rows_left_out"] == 2.0
        # The rows that are left are those that have an advantage in the other run, and so is the policy.
        expected, _ = run_replay(alone, "update.mismatch.mode=mask", iterations="1")
        assert expected.rows_left_out == 0
        assert summary.policy_digest == expected.policy_digest
        far, _ = run_replay(finished, "update.mismatch.mode=mask", iterations="1", max_staleness=7, name="far")
        assert (far.staleness, far.rows_left_out) == (7, 0)
        assert far.policy_digest != summary.policy_digest

    @pytest.mark.slow
    def test_none_at_all_allows_own_rows_alone(self, finished: Runs) -> None:
        summary, _ = run_replay(finished, max_staleness=0)
        assert summary.policy_digest == finished.policy_digest(2)
        # With another learning rate, version 1 is another policy than the one that sampled the second iteration.
        (error,) = refused(lambda: run_replay(finished, "update.learning_rate=1e-4", max_staleness=0, name="other"))
        assert (error.place, error.value) == ("--max-staleness", 0)
        assert finished.path("policies/000001.manifest.json", run="other").is_file()
        corrected, _ = run_replay(finished, "update.learning_rate=1e-4", max_staleness=1, name="other")
        assert corrected.iterations == 2
