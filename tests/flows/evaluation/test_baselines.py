"""What blank images and the targets themselves earn on the held-out prompts, beside the policy."""

from statistics import fmean

import pytest
from PIL import Image

from data.shapes import BACKGROUNDS
from flows.inspection.inspect_run import inspect_run
from grpo_core.rewards.similarity.pixels import SsimReward
from tests.flows.conftest import REPOSITORY, Runs
from tests.grpo_core.rewards.conftest import make_batch

HELD_OUT = {
    "run__iterations": 1,
    "evaluate__prompts": "data/prompts/shapes_heldout.jsonl",
    "evaluate__targets": "data/targets",
    "evaluate__target_column": "target",
    "evaluate__limit": 3,
    "evaluate__samples_per_prompt": 1,
    "rewards": [{"reward": "ssim", "weight": 0.5}, {"reward": "r2", "weight": 2.0}],
}


def test_they_are_scored_once_by_the_runs_rewards(empty: Runs) -> None:
    first = empty.start(**HELD_OUT)
    drawn = [stage for stage in first.stages if stage.startswith("baseline")]
    assert drawn == [
        f"baseline {name}: {stage}"
        for name in ("blank", "target")
        for stage in ("score r2", "score ssim", "compute advantages")
    ]
    earned = []
    for row in (REPOSITORY / HELD_OUT["evaluate__prompts"]).read_text().splitlines()[:3]:  # type: ignore[operator]
        name = row.partition('"target": "')[2].partition(".png")[0]
        with Image.open(REPOSITORY / "data" / "targets" / f"{name}.png") as target:
            blank = Image.new("RGB", target.size, BACKGROUNDS[name.rpartition("-")[2]])
            (score,) = SsimReward().score(make_batch([blank], [target]))
        earned.append(score.value)
    # A single colour has no R²; the target has all of both.
    expected = {"blank": 0.5 * fmean(value for value in earned if value is not None), "target": 2.5}
    assert len(earned) == 3
    assert first.summary.heldout_baselines == pytest.approx(expected)
    assert inspect_run("run", root=str(empty.root)).summary(None).heldout_baselines == first.summary.heldout_baselines
    again = empty.start(**HELD_OUT)
    assert again.stages == ()
    assert again.summary.heldout_baselines == first.summary.heldout_baselines
