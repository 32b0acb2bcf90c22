"""A run of several image sizes, from two data sets: in every table, and through kills, a rescoring and a replay."""

import io
import json
import time
from pathlib import Path

import polars as pl
import pytest
from PIL import Image

from tests.flows.conftest import Runs, training_process
from tests.flows.replaying.replays import metrics, run_replay
from tests.flows.rescoring.test_rescore import scored_again

REWARDS = (
    {"reward": "ssim", "datasets": ["shapes"]},
    {"reward": "jpeg", "settings": {"direction": "compressible"}},
    {"reward": "diversity", "weight": 0.1},
)


def settings(folder: Path) -> dict[str, object]:
    """Two data sets: 64x64 with targets, as the rollout has it, and one of 32x32 with other sizes in its rows."""
    rows = [{"prompt": "a red circle"}, {"prompt": "a blue cross", "size": "64x32"}, {"prompt": "a pink heart"}]
    rows.append({"prompt": "a red circle", "width": 40, "height": 64})
    (folder / "mixed.json").write_text(json.dumps(rows))
    shapes = {"name": "shapes", "targets": "data/targets", "target_column": "target"}
    mixed = {"name": "mixed", "prompts": f"{folder}/mixed.json", "width": 32, "height": 32}
    return {
        "data": {"datasets": [{**shapes, "prompts": "data/prompts/shapes_train.jsonl"}, mixed]},
        "evaluate": {"datasets": [{**shapes, "prompts": "data/prompts/shapes_heldout.jsonl", "limit": 2}, mixed]},
        "rewards": REWARDS,
        "rollout__prompts_per_iteration": 6,
        "rollout__group_size": 3,
        "rollout__prompts_per_batch": 2,
        "rollout__top_p": 0.9,
        # Microbatches of several sizes.
        "update__micro_batch_size": 4,
        "update__minibatch_size": 9,
        "update__kl_coef": 0.01,
    }


def sizes_of(table: pl.DataFrame) -> set[tuple[str, int, int]]:
    return {*table.select("dataset", "width", "height").iter_rows()}


@pytest.mark.slow
def test_a_run_of_several_sizes_comes_through(server: None, tmp_path: Path) -> None:
    whole, killed = Runs(tmp_path / "whole"), Runs(tmp_path / "killed")
    given = settings(tmp_path)
    digest = whole.start(**given).summary.policy_digest

    rollouts = pl.concat(
        [pl.read_parquet(path) for path in sorted(whole.path().glob("iteration_*/rollouts/part-*.parquet"))]
    )
    expected = {("shapes", 64, 64), ("mixed", 32, 32), ("mixed", 64, 32), ("mixed", 40, 64)}
    assert sizes_of(rollouts) == expected
    lengths = {(64, 64): 80, (32, 32): 32, (64, 32): 42, (40, 64): 55}
    for row in rollouts.iter_rows(named=True):
        size = (row["width"], row["height"])
        assert Image.open(io.BytesIO(row["image"]["bytes"])).size == size
        assert (row["length"], row["max_length"]) == (lengths[size], 80)
    assert max(metrics(whole, iteration, "run")["sampling/sampling_logp_difference/max"] for iteration in (1, 2)) < 1e-4
    assert sizes_of(pl.read_parquet(whole.path("evaluations/000002/rollouts/part-*.parquet"))) == expected

    with training_process(killed, tmp_path / "process", **given) as process:
        while not killed.path("iteration_000002/rollouts/part-00000.parquet").exists():
            assert process.poll() is None
            time.sleep(0.01)
    assert killed.start(**given).summary.policy_digest == digest

    other = ({"reward": "psnr", "datasets": ["shapes"]}, {"reward": "edge_density"}, REWARDS[2])
    digests = set()
    for runs in (whole, killed):
        _, heard = scored_again(runs, *other, name="other")
        assert sum("score edge_density" in stage for stage in heard.stages) == 2
        assert run_replay(runs)[0].policy_digest == digest
        digests.add(run_replay(runs, name="other", advantages="other")[0].policy_digest)
    assert len(digests) == 1
    assert killed.tables() == whole.tables()
