"""Readers of a pruned run, and prunes that are refused."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.inspect_run import inspect_run
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from flows.rewards import analyse_rewards
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.run_lock import locked
from tests.flows.conftest import Runs, Start, refused
from tests.flows.pruning.conftest import RUN, contents, deleted, pruned, tree
from tests.flows.rescoring.test_rescore import PSNR, SSIM, scored_again


class TestReaders:
    @pytest.fixture
    def gone(self, runs: Runs) -> Runs:
        pruned(runs, policies_every=2, images_older_than="0i")
        return runs

    def test_an_iteration_without_images_is_shown(self, gone: Runs, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        inspection = inspect_run(RUN, root=str(gone.root), iteration=2, html=page)
        (warning,) = inspection.warnings
        assert warning.startswith("iteration 2: ")
        assert page.read_text().count("image removed") >= 2
        assert inspection.run.finished
        shown = CliRunner().invoke(application, ["inspect", RUN, "--iteration", "2", "--root", str(gone.root)])
        assert shown.exit_code == 0

    def test_the_analysis_scores_nothing_again(self, gone: Runs) -> None:
        summary = analyse_rewards(RUN, root=str(gone.root))
        assert set(summary.not_repeated) == {"ssim", "psnr"}
        assert [reward["noise"] for reward in summary.analysis["rewards"]] == [None, None]

    def test_rescoring_needs_images_for_scores_that_are_not_stored(self, gone: Runs) -> None:
        (error,) = refused(lambda: scored_again(gone, SSIM, {"reward": "jpeg"}, sources=(RUN,)))
        assert (error.place, error.value) == ("rewards.1.jpeg", "jpeg")
        summary, _ = scored_again(gone, {**SSIM, "weight": 0.1}, PSNR, sources=(RUN,))
        assert summary.computed == {"ssim": 0, "psnr": 0}


def problems(**requested: Any) -> list[tuple[str, object]]:
    errors = refused(lambda: prune(PruneRequest(**{"sources": (RUN,), **requested})))
    return [(error.place, error.value) for error in errors]


WRONG: list[tuple[dict[str, Any], str, object]] = [
    ({}, "grpo prune", "no rule"),
    ({"policies_every": 0}, "--policies-every", 0),
    ({"policies_last": 0}, "--policies-last", 0),
    ({"images_older_than": "a month"}, "--images-older-than", "a month"),
    ({"images_older_than": "-3d"}, "--images-older-than", "-3d"),
    ({"states_older_than": "3w"}, "--states-older-than", "3w"),
    ({"sources": (RUN, RUN), "policies_last": 1}, "RUN", [RUN, RUN]),
    ({"sources": ("prune",), "policies_last": 1}, "RUN", "prune"),
]


class TestRefused:
    def test_with_place_and_value(self, trained: tuple[Runs, Start]) -> None:
        root = trained[0].root
        before = tree(root)
        for requested, place, value in WRONG:
            assert problems(root=str(root), **requested) == [(place, value)]
        assert tree(root) == before

    @pytest.mark.parametrize("place", ["", "rescored/mix"])
    def test_while_another_process_writes(self, runs: Runs, place: str) -> None:
        before = contents(runs.root)
        with locked(ArtifactStore(str(runs.root), RUN), place, setting="run.name", value=RUN):
            assert problems(root=str(runs.root), policies_last=1) == [("RUN", f"{RUN}/{place}".rstrip("/"))]
            assert deleted(pruned(runs, policies_last=1, dry_run=True))
        assert contents(runs.root) == before


def test_rules_have_defaults() -> None:
    assert PruneRequest(sources=("a",), policies_every=5).retention.last == 2
    assert PruneRequest(sources=("a",), policies_last=7).retention.last == 7
    retention = PruneRequest(sources=("a",), images_older_than="3d").retention
    assert (retention.last, retention.by) == (None, "grpo prune --images-older-than 3d")
