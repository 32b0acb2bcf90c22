"""`run.keep_policies`: a training deletes the versions that it no longer needs, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from configs.sections import KeepPoliciesSection
from flows.evaluation.plan import plan_evaluate
from flows.pipeline.requests import EvaluateRequest
from tasks.runs.layout import evaluation_folder
from tasks.runs.stored import stored_versions
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.run_lock import locked
from tests.flows.conftest import Runs, Start, refused
from tests.flows.pruning.conftest import ITERATIONS, RUN, again, best, images


def start(runs: Runs, keep: dict[str, Any], **changes: object) -> Start:
    """Start the finished run again with these policies to be kept."""
    return again(runs, **{"run__keep_policies": keep, **changes})


def stored(runs: Runs, run: str = RUN) -> list[int]:
    return stored_versions(ArtifactStore(str(runs.root), run))


def test_the_last_and_the_best_stay_and_the_run_goes_on(runs: Runs, trained: tuple[Runs, Start]) -> None:
    first = start(runs, {"last": 1})
    assert stored(runs) == sorted({best(runs), ITERATIONS})
    assert not list(runs.path("policies", "000001", run=RUN).rglob("*.safetensors"))
    assert images(runs, "iteration_000001") == 4
    assert first.summary.policy_digest == trained[1].summary.policy_digest
    assert first.summary.heldout_after == trained[1].summary.heldout_after
    # Version 1, which is due now, cannot be evaluated any more.
    again = start(runs, {"last": 1}, evaluate__every=1)
    assert (again.stages, again.summary.policy_digest) == ((), first.summary.policy_digest)
    assert not runs.path("evaluations", "000001", run=RUN).exists()
    (error,) = refused(lambda: plan_evaluate(EvaluateRequest(run=RUN, root=str(runs.root), policy=1)))
    assert "run.keep_policies" in error.hint


@pytest.mark.slow
def test_the_best_stays_where_its_evaluation_is_not_due_any_more(runs: Runs) -> None:
    assert best(runs) < ITERATIONS
    start(runs, {"last": 1}, evaluate__every=0)
    assert stored(runs) == [best(runs), ITERATIONS]


@pytest.mark.slow
def test_what_is_in_use_stays(runs: Runs) -> None:
    store = ArtifactStore(str(runs.root), RUN)
    other = {
        "replayed": f"run: {{iterations: 9}}\nreplay: {{source: {RUN}, policy: 2}}\n",
        "adapted": f"policy: {{adapter: {RUN}@3}}\n",
    }
    for run, config in other.items():
        runs.path(run=run).mkdir()
        runs.path("config.yaml", run=run).write_text(config)
    with locked(store, evaluation_folder(1, "letters"), setting="RUN", value=RUN):
        start(runs, {"last": 1, "best": False})
        assert stored(runs) == [1, 2, 3, ITERATIONS]
    for run in other:
        runs.path("config.yaml", run=run).unlink()
    start(runs, {"last": 1, "every": 3, "best": False})
    assert stored(runs) == [3, ITERATIONS]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_ended_while_it_deletes_it_ends_with_the_same_policy(
    empty: Runs, staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"run__staleness": staleness, "update__reference": {"refresh_every": 2}, "update__kl_coef": 0.1}
    undisturbed = Runs(tmp_path / "undisturbed").start("kept", run__iterations=3, **changes)
    whole, calls = LocalFileSystem.rm_file, []

    def rm_file(filesystem: LocalFileSystem, path: str) -> None:
        if "policies" in path:
            calls.append(path)
            if len(calls) == 2:
                raise KeyboardInterrupt
        whole(filesystem, path)

    keep = {"run__keep_policies": {"last": 1}, "run__iterations": 3, **changes}
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "rm_file", rm_file)
        with pytest.raises(KeyboardInterrupt):
            empty.start("kept", **keep)
    assert len(calls) == 2
    ended = empty.start("kept", **keep)
    assert ended.summary.policy_digest == undisturbed.summary.policy_digest
    assert stored(empty, "kept") == [[3], [2, 3]][staleness]


@pytest.mark.parametrize(
    ("section", "iterations", "staleness", "expected"),
    [
        # The last two, the best, and the one that is being written.
        ({}, 200, 0, 4),
        ({"last": 1, "best": False}, 200, 3, 5),
        ({"every": 10, "best": False}, 200, 0, 23),
        ({"last": 5}, 3, 0, 3),
    ],
)
def test_the_most_that_is_stored_at_once(
    section: dict[str, Any], iterations: int, staleness: int, expected: int
) -> None:
    assert KeepPoliciesSection(**section).count(iterations, staleness) == expected
