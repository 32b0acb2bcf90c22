"""A run that starts from another run's adapter, and one that evaluates a moving average."""

import polars as pl
import pytest

from flows.evaluation.plan import plan_evaluate
from flows.pipeline.requests import EvaluateRequest
from tasks.runs.stored import read_policy
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import Runs, refused
from tests.flows.pruning.conftest import EVALUATED

pytestmark = pytest.mark.slow


def test_a_run_starts_from_a_version_of_another(empty: Runs) -> None:
    first = empty.start("first", update__kl_coef=0.1, **EVALUATED)
    adapted = {"policy__lora": None, "update__kl_coef": 0.1, "run__iterations": 1, **EVALUATED}
    second = empty.start("second", policy__adapter="first@2", **adapted)
    assert second.summary.heldout_before == first.summary.heldout_after
    steps = pl.read_parquet(empty.path("policies", "000001", "tokens", "update_steps.parquet", run="second"))
    # The KL is that to the adapter, and not to the model under it.
    assert steps["kl"][0] == pytest.approx(0.0, abs=1e-9)
    assert steps["kl"][1] > 0
    assert empty.start("second", policy__adapter="first@2", **adapted).stages == ()
    hints = {"first@9": "policy versions 1 to 2", "first@0": "leave policy.adapter out", "frist@2": "grpo list"}
    for adapter, hint in hints.items():
        (error,) = refused(lambda adapter=adapter: empty.start("third", policy__adapter=adapter, **adapted))
        assert (error.place, error.value) == ("policy.adapter", adapter)
        assert hint in error.hint
    (error,) = refused(lambda: empty.start("third", policy__adapter="first@2", policy__lora__rank=8))
    assert (error.place, error.value) == ("policy.lora.rank", 8)


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
    assert plan_evaluate(EvaluateRequest(run="run", root=str(empty.root), policy=2)).stored is not None
    # A run that continues does so from the weights, and begins an average of its own.
    empty.start("continued", run__continue_from="run@2", run__iterations=1, update__ema=0.5, **EVALUATED)
    assert sampler("evaluations/000000", "continued") == sampler("iteration_000001", "continued") == policies[2].digest
    continued = read_policy(ArtifactStore(str(empty.root), "continued"), 1)
    assert sampler("evaluations/000001", "continued") == continued.copies["ema"] != continued.digest
