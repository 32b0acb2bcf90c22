"""A run that starts from the weights of another: where it begins, and that it goes on without the other."""

import shutil

import polars as pl
import pytest

from tasks.runs.stored import choose_policy, read_policy
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import Runs, refused
from tests.flows.training.test_train import FIRST

ADAPTER = {"rank": 8, "alpha": 8.0}


def steps(runs: Runs, run: str) -> pl.DataFrame:
    return pl.read_parquet(runs.path("policies/000001/tokens/update_steps.parquet", run=run))


def test_weights_go_on_and_the_optimizer_begins_anew(finished: Runs) -> None:
    source = read_policy(ArtifactStore(str(finished.root), "run"), 1)
    begun = finished.start("next", run__continue_from="run@1", run__iterations=1, update__learning_rate=1e-3)
    assert begun.stages == FIRST
    (row, *_) = finished.tables("next")["iteration_000001/rollouts/part-00000.parquet"]
    assert (row["policy_version"], row["policy_digest"]) == (0, source.digest)
    assert steps(finished, "next")["optimizer_step"].to_list() == [1, 2]
    # The reference is still the model: the policy differs from it before the first step.
    assert steps(finished, "run")["kl"][0] == pytest.approx(0.0, abs=1e-12)
    assert steps(finished, "next")["kl"][0] > 1e-9
    initial, _ = choose_policy(ArtifactStore(str(finished.root), "next"), 0, "the model's digest")
    assert (initial.version, initial.digest) == (0, source.digest)

    shutil.rmtree(finished.path())
    again = finished.start("next", run__iterations=1, update__learning_rate=1e-3)
    assert again.stages == ()
    assert again.summary.policy_digest == begun.summary.policy_digest
    assert "continue_from: run@1" in finished.path("config.yaml", run="next").read_text()


@pytest.mark.slow
def test_without_a_version_it_is_the_last_one_when_the_run_began(finished: Runs) -> None:
    begun = finished.start("next", run__continue_from="run", run__iterations=1)
    finished.start(run__iterations=3)
    for start in ("run", "run@2", None):
        again = finished.start("next", run__continue_from=start, run__iterations=1)
        assert again.stages == ()
        assert again.summary.policy_digest == begun.summary.policy_digest


def test_another_adapter_is_refused_with_what_the_source_has(finished: Runs) -> None:
    (error,) = refused(lambda: finished.start("next", run__continue_from="run", policy__lora=ADAPTER))
    assert error.place == "policy.lora"
    assert "'rank': 4" in error.hint
    assert not finished.path("config.yaml", run="next").exists()


def test_a_source_that_has_trained_nothing_yet_is_refused(finished: Runs) -> None:
    shutil.copytree(finished.path(), finished.path(run="next"))
    shutil.rmtree(finished.path("policies", run="next"))
    (error,) = refused(lambda: finished.start("third", run__continue_from="next", run__iterations=1))
    assert (error.place, "no valid policy" in error.hint) == ("run.continue_from", True)
