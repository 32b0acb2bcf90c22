import json
from pathlib import Path

import pytest

from tasks.runs.layout import STAGES
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tasks.runs.run_view import RunView
from tests.tasks.reports.made_runs import RunMaker, flip_last_byte, whole_run


def read(maker: RunMaker, shown: int | None = None) -> RunView:
    return read_run(RunReader(maker.store), shown)


def test_a_finished_run(tmp_path: Path) -> None:
    run = read(whole_run(tmp_path))
    assert run.finished
    assert (run.policy_version, run.policy_digest) == (2, f"{2:064d}")
    assert run.series("reward") == [(1.0, 0.5), (2.0, 0.6)]
    assert run.series("kl") == [(1.0, 0.01), (2.0, 0.02)]
    assert run.heldout_series() == [(0.0, 0.5), (2.0, 0.75)]
    # Two iterations of 4 + 2 + 1 + 3 s, and two evaluations of 4 + 2 + 1 s.
    assert run.seconds == {
        "total": 34.0,
        "rollouts": 8.0,
        "rewards": 4.0,
        "advantages": 2.0,
        "update": 6.0,
        "evaluation": 14.0,
    }
    assert run.shown is not None
    assert run.shown.iteration == 2
    assert run.shown.metrics["step_time"] == 10.0
    assert run.shown.metrics["heldout_reward"] == 0.75
    assert run.damages == ()


def test_a_run_killed_in_its_second_iteration(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, planned=5)
    maker.iteration(1)
    maker.rollouts("iteration_000002", "i000002")
    # Moved to its place, its manifest not yet written.
    (maker.folder / "iteration_000002/rewards/ssim").mkdir(parents=True)
    run = read(maker)
    assert not run.finished
    assert run.policy_version == 1
    assert [tuple(view.stages) for view in run.iterations][1] == ("rollouts",)
    assert run.shown is not None
    assert run.shown.iteration == 1  # the last one whose images have rewards
    assert run.damages == ()


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run = read(RunMaker(tmp_path))
    assert (run.policy_version, run.policy_digest, run.shown) == (0, "base" * 16, None)
    assert run.seconds["total"] == 0


def test_guardrails_by_label(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    for version, label, mean in ((0, "jpeg", 0.5), (2, "jpeg", 0.25), (2, "words", 1.0)):
        maker.guardrail(version, label, mean)
    run = read(maker)
    assert run.guardrail_series == {"jpeg": [(0.0, 0.5), (2.0, 0.25)], "words": [(2.0, 1.0)]}
    assert run.heldout_series() == [(0.0, 0.5), (2.0, 0.75)]
    assert run.damages == ()


def test_a_damaged_score_table_leaves_the_others(tmp_path: Path) -> None:
    maker = whole_run(tmp_path, labels=("x", "y"))
    flip_last_byte(maker.folder / "iteration_000002/rewards/x/scores.parquet")
    run = read(maker)
    assert [damage.place for damage in run.damages] == ["iteration_000002/rewards/x/scores.parquet"]
    assert [reference.folder for reference in run.iterations[1].stages["rewards"]] == ["iteration_000002/rewards/y"]
    assert [len(run.series(f"rewards/{label}/mean")) for label in "xy"] == [1, 2]


@pytest.mark.parametrize(
    ("stage", "iteration"), [("rollouts", 1), ("rollouts", 2), ("rewards/ssim", 1), ("advantages", 2)]
)
def test_a_damaged_stage_is_left_out_and_named(tmp_path: Path, stage: str, iteration: int) -> None:
    maker = whole_run(tmp_path)
    file, *_ = sorted((maker.folder / f"iteration_{iteration:06d}" / stage).iterdir())
    flip_last_byte(file)
    run = read(maker)
    assert [damage.place for damage in run.damages] == [f"iteration_{iteration:06d}/{stage}/{file.name}"]
    assert stage.partition("/")[0] not in run.iterations[iteration - 1].stages
    assert len(run.iterations[iteration - 1].stages) == 3


def test_the_last_valid_policy_counts(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    flip_last_byte(maker.folder / "policies/000002/tokens/adapter_model.safetensors")
    run = read(maker)
    assert (run.policy_version, run.policy_digest, run.finished) == (1, f"{1:064d}", False)


TABLE = "iteration_000001/metrics.parquet"


@pytest.mark.parametrize(
    ("place", "content"),
    [
        *((TABLE, content) for content in (b"", b"PAR1 and no more", None)),
        *(("config.yaml", content) for content in (b"run: [", b"\xff\xfe\x00", b"7", None)),
    ],
)
def test_metrics_come_from_the_stages_whatever_else_is_damaged(
    tmp_path: Path, place: str, content: bytes | None
) -> None:
    maker = whole_run(tmp_path)
    if content is not None:
        (maker.folder / place).write_bytes(content)
    elif place == TABLE:
        maker.metrics(1, {"reward": 0.987, "kl": 0.01})
    else:
        (maker.folder / place).unlink()
    run = read(maker)
    assert [damage.place for damage in run.damages] == [place]
    assert run.planned == (2 if place == TABLE else None)
    assert run.series("reward") == [(1.0, 0.5), (2.0, 0.6)]


def test_moved_folders_and_their_reasons(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    maker.store.quarantine(["iteration_000002"], reason="a bit fell")
    broken = maker.folder / "quarantine" / "0002-abcdef"
    broken.mkdir()
    (broken / "reason.json").write_text(json.dumps({"reason": 3, "paths": 4}))
    first, second = read(maker).moved
    assert first.reason == "a bit fell"
    assert first.paths == ("iteration_000002",)
    assert (second.reason, second.paths) == ("3", ())


def test_metrics_of_an_iteration_of_several_rounds(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, datasets=("sums", "poems"))
    maker.iteration(1, rounds=3)
    run = read(maker)
    (view,) = run.iterations
    assert [len(view.stages[stage]) for stage in STAGES] == [3, 3, 1, 1]
    assert view.stages["advantages"][0].folder == "iteration_000001/round_03/advantages"
    assert view.complete
    assert (view.metrics["num_tokens"], view.metrics["rounds"], view.metrics["groups_dropped"]) == (48.0, 3.0, 3.0)
    # Three rounds of 4 + 2 s; the advantages and the update count once.
    assert view.metrics["step_time"] == 3 * (4.0 + 2.0) + 1.0 + 3.0
    assert run.seconds["total"] == view.metrics["step_time"]
    assert run.dataset_rewards == {"poems": "datasets/poems/reward", "sums": "datasets/sums/reward"}
    assert run.series("datasets/poems/reward") == [(1.0, 0.6)]
    assert run.damages == ()


def test_a_run_killed_in_its_second_round(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    maker.draw("iteration_000001", 1, "i000001", ["i000001"])
    maker.rollouts("iteration_000001/round_02", "i000001.d02")
    (view,) = read(maker).iterations
    assert (view.rounds, len(view.stages["rewards"]), view.complete) == (2, 1, False)
    assert view.metrics["num_tokens"] == 16.0  # of the round that has advantages


def test_a_damaged_round_leaves_the_others(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    maker.iteration(1, rounds=2)
    flip_last_byte(maker.folder / "iteration_000001/round_02/rollouts/part-00000.parquet")
    run = read(maker)
    assert [damage.place for damage in run.damages] == ["iteration_000001/round_02/rollouts/part-00000.parquet"]
    (view,) = run.iterations
    assert [reference.folder for reference in view.stages["rollouts"]] == ["iteration_000001/rollouts"]
    assert "num_tokens" not in view.metrics  # half of them would mislead
    assert view.metrics["reward"] == 0.5
    # Damaged advantages are not replaced by those of an earlier round.
    flip_last_byte(maker.folder / "iteration_000001/round_02/advantages/advantages.parquet")
    (view,) = read(maker).iterations
    assert "advantages" not in view.stages
    assert "reward" not in view.metrics
