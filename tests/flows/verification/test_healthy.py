"""Healthy runs of every shipped tiny configuration, and of every way to make or change a run: nothing is named."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.validation import validated
from flows.pruning.prune import prune
from flows.pruning.request import PruneRequest
from flows.replaying import replay
from flows.requests import ReplayRequest, RescoreRequest
from flows.rescoring.rescore import rescore
from tasks.runs.layout import STATE_FILE
from tasks.verification.records import VerificationReport
from tests.flows.conftest import heard_of, sha256_of
from tests.flows.verification.conftest import Settings, trained, verified
from tests.flows.verification.planting import EVALUATED

FEW: Settings = {
    "run.iterations": 2,
    "rollout.prompts_per_iteration": 2,
    "evaluate.limit": 1,
    "evaluate.samples_per_prompt": 2,
    "evaluate.every": 1,
}
MINIBATCHES: Settings = {"update.minibatch_size": 8, "update.micro_batch_size": 8}
OF_BOTH: Settings = {key.replace(".", ".tokens.", 1): size for key, size in MINIBATCHES.items()}
MIX: Settings = {"rewards": [{"reward": "ssim", "normalize": "running"}, {"reward": "psnr", "weight": 0.1}]}
SMALL: Settings = {"rollout.height": 32, "rollout.width": 32, "rollout.num_inference_steps": 3}


def require_equal(root: Path, name: str, *, untried: set[str] = frozenset()) -> VerificationReport:  # type: ignore[assignment]
    """Assert that every stage of a run is equal to the bit, but those of these titles, and that none was written."""
    before = sha256_of(root)
    report = verified(root, name, iterations="all")
    assert sha256_of(root / name) == {
        path.partition("/")[2]: digest for path, digest in before.items() if path.startswith(f"{name}/")
    }
    assert report.problems == ()
    levels = {stage.title: (stage.level, stage.differences, stage.reason) for stage in report.stages}
    assert {title for title, (level, _, _) in levels.items() if level == "untried"} == untried, levels
    assert {level for level, _, _ in levels.values()} - {"untried"} == {"equal"}, levels
    assert (report.exit_code, report.tolerance) == (0, 0.0)
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tiny", {}),
        ("tiny_text", {}),
        ("tiny_sd3", {}),
        ("tiny_sd3_nft", {}),
        ("tiny_both", {}),
        ("tiny_edit", {}),
        ("tiny_grounding", {}),
        ("tiny_text", {"run.iterations": 4, "run.staleness": 1}),
        ("tiny_text", {"run.iterations": 4, "data.curriculum.kind": "difficulty"}),
        ("tiny_text", {"advantages.constant_groups": "redraw", "rollout.prompts_per_iteration": 4}),
        ("tiny_text", {"advantages.kl_coef": 0.05}),
        ("tiny_sd3", {**MIX, "update.ema": 0.9}),
        ("tiny_sd3", {**SMALL, "rollout.previews": {"per_prompt": 14, "steps": 2}, "rollout.sde_window_range": [0, 2]}),
    ],
    ids=str,
)
def test_shipped_configurations(server: None, tmp_path: Path, name: str, changes: Settings) -> None:
    trained(tmp_path, name, FEW, OF_BOTH if name == "tiny_both" else MINIBATCHES, changes)
    require_equal(tmp_path, name)


def copied(stored: Callable[[str], Path], name: str, folder: Path) -> Path:
    """Return the root of a copy of a finished run."""
    root = folder / "runs"
    shutil.copytree(stored(name).parent, root)
    return root


def asked(model: Any, flow: Any, **values: Any) -> None:
    """Run a flow of a request."""
    heard_of(lambda: asyncio.run(flow(validated(model, values))))


@pytest.mark.slow
def test_a_rescored_run(stored: Callable[[str], Path], tmp_path: Path) -> None:
    root = copied(stored, "tiny_sd3", tmp_path)
    rewards = tmp_path / "rewards.yaml"
    rewards.write_text("rewards: [{reward: ssim, weight: 0.5}, {reward: psnr, weight: 0.5}]")
    asked(RescoreRequest, rescore, sources=["tiny_sd3"], rewards=str(rewards), name="other", root=str(root))
    report = require_equal(root, "tiny_sd3")
    assert any(stage.folder.startswith("rescored/other/") for stage in report.stages)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["rewards.0.weight=0.5"]], ids=str)
def test_a_replay(stored: Callable[[str], Path], tmp_path: Path, overrides: list[str]) -> None:
    root = copied(stored, "tiny_text", tmp_path)
    asked(ReplayRequest, replay, source="tiny_text", name="again", root=str(root), overrides=overrides, trust_code=True)
    report = require_equal(root, "again")
    assert {stage.kind for stage in report.stages} == {"advantages", "update", "evaluation"}


@pytest.mark.slow
def test_a_run_continued_from_another(stored: Callable[[str], Path], tmp_path: Path) -> None:
    root = copied(stored, "tiny_text", tmp_path)
    trained(root, "tiny_text", FEW, MINIBATCHES, {"run.name": "next", "run.continue_from": "tiny_text@3"})
    require_equal(root, "next")


@pytest.mark.slow
def test_a_pruned_run(stored: Callable[[str], Path], tmp_path: Path) -> None:
    root = copied(stored, "tiny_sd3", tmp_path)
    rules = {"policies_last": 1, "images_older_than": "2i", "states_older_than": "1i"}
    prune(validated(PruneRequest, {"sources": ["tiny_sd3"], "root": str(root), **rules}))
    kept = {0, *(int(path.parent.name) for path in root.glob(f"tiny_sd3/policies/*/{STATE_FILE}"))}
    assert 1 < len(kept) < 1 + EVALUATED
    gone = {f"iteration {number}: collect rollouts" for number in range(1, 5) if number - 1 not in kept}
    # Those without states, and the last one without the version that it trains.
    gone |= {f"iteration {number}: update policy" for number in range(1, 5) if number < 4 or 3 not in kept}
    require_equal(root, "tiny_sd3", untried=gone | {f"iteration {number}: score ssim" for number in (1, 2)})
