"""Metrics of rounds and iterations, and the view of a run with whatever is damaged in it."""

import io
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tasks.metrics import pool_rounds, stage_metrics
from tasks.runs.layout import STAGES, SamplingRound, StoredEvaluation
from tasks.runs.read_run import gather_metrics, read_metrics, read_run, with_earlier, write_metrics
from tasks.runs.reader import RunReader
from tasks.runs.run_view import Cost, EvaluationView, IterationView, RunHistory, RunView
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.reports.made_runs import RunMaker, flip_last_byte, whole_run


def artifact(folder: str, seconds: float, rows: int = 1, **metrics: float) -> ArtifactRef:
    return ArtifactRef(
        uri=f"run/{folder}", sha256="a", digest="b", schema_version=4, rows=rows, seconds=seconds, metrics=metrics
    )


def kept(store: ArtifactStore) -> dict[str, float]:
    content = store.read_file("iteration_000001/metrics.parquet")
    table = pl.read_parquet(io.BytesIO(content))
    return dict(zip(table["metric"], table["value"], strict=True))


UPDATE = artifact("policies/000001", 0.5, kl=0.1)
ADVANTAGES = artifact("iteration_000001/advantages", 0.25, reward=0.4)


def evaluation(guardrails: dict[str, ArtifactRef] | None = None) -> EvaluationView:
    advantages = artifact("evaluations/000001/advantages", 9.0, reward=0.7)
    rollouts = artifact("evaluations/000001/rollouts", 5.0)
    return EvaluationView.of(1, StoredEvaluation(rollouts, advantages, {}, guardrails or {}))


def test_metrics_of_all_stages_with_their_seconds() -> None:
    # The rewards of a round are computed side by side, so the slowest is what the stage took.
    rewards = {"a": artifact("r/rewards/a", 1.0, a=1.0), "b": artifact("r/rewards/b", 0.75, b=2.0)}
    rounds = [SamplingRound(artifact("r/rollouts", 2.0, tokens=80.0), rewards)]
    heldout = evaluation()
    previous = {"num_tokens": 20.0, "kl": 0.3}
    assert "num_tokens" not in gather_metrics(rounds, ADVANTAGES, UPDATE, heldout, previous={"kl": 0.3})
    assert gather_metrics(rounds, ADVANTAGES, UPDATE, heldout, previous=previous) == {
        "num_tokens": 100.0,
        "a": 1.0,
        "b": 2.0,
        "reward": 0.4,
        "kl": 0.1,
        "seconds/rollouts": 2.0,
        "seconds/rewards": 1.0,
        "seconds/advantages": 0.25,
        "seconds/update": 0.5,
        "step_time": 3.75,
        "samples_per_second": 0.5,
        "heldout_reward": 0.7,
    }


def test_seconds_and_speeds_count_all_rounds_and_memory_the_highest_of_them() -> None:
    sampled = (
        artifact("a", 2.0, 8, **{"completions/mean_length": 5.0}).model_copy(update={"peak_memory": 3 * 2**30}),
        artifact("b", 3.0, 2, **{"completions/mean_length": 10.0}).model_copy(update={"peak_memory": 4 * 2**30}),
    )
    scored = ({"x": artifact("c", 1.0), "y": artifact("d", 0.75)}, {"x": artifact("e", 0.5), "y": artifact("f", 0.75)})
    rounds = [SamplingRound(*each) for each in zip(sampled, scored, strict=True)]
    metrics = gather_metrics(rounds, ADVANTAGES, UPDATE, None)
    # Each round's slowest reward counts.
    assert (metrics["seconds/rollouts"], metrics["seconds/rewards"]) == (5.0, 1.0 + 0.75)
    assert (metrics["samples_per_second"], metrics["tokens_per_second"]) == (10 / 5, (40 + 20) / 5)
    assert {name: value for name, value in metrics.items() if "gpu" in name} == {"gpu_memory/rollouts": 4.0}


def test_of_previews_time_memory_and_speed_count() -> None:
    scores = {"x": artifact("d", 1.0, reward=9.0), "y": artifact("e", 1.5)}
    previewed = StoredEvaluation(artifact("c", 2.0, 32), artifact("f", 0.5, reward=9.0), scores, {})
    rounds = [SamplingRound(artifact("a", 3.0, 7), {"x": artifact("b", 0.25, x=1.0)}, previewed)] * 2
    metrics = gather_metrics(rounds, ADVANTAGES, UPDATE, None)
    assert (metrics["reward"], metrics["x"]) == (0.4, 1.0)
    seconds = {name: metrics[f"seconds/previews/{name}"] for name in ("rollouts", "rewards", "advantages")}
    assert seconds == {"rollouts": 4.0, "rewards": 3.0, "advantages": 1.0}
    assert metrics["step_time"] == 8.0 + 2 * (3.0 + 0.25) + 0.25 + 0.5
    assert metrics["samples_per_second"] == 14 / (8.0 + 6.0)
    history = RunHistory(name="x", folder="x", iterations=[IterationView(1, {}, metrics)])
    assert history.cost() == Cost(samples=14, seconds=metrics["step_time"])


def test_drafts_count_once_and_a_replay_has_advantages_and_an_update() -> None:
    uneven = artifact("a", 2.0, 16, **{"completions/mean_length": 5.0, "completions/token_samples": 12.0})
    metrics = gather_metrics([SamplingRound(uneven, {})], ADVANTAGES, UPDATE, None)
    assert (metrics["samples_per_second"], metrics["tokens_per_second"]) == (16 / 2, 60 / 2)
    metrics = gather_metrics([SamplingRound(artifact("a", 2.0, 8), {})], ADVANTAGES, UPDATE, None)
    assert metrics["samples_per_second"] == 4.0
    assert not [name for name in metrics if "token" in name]
    scored = artifact("iteration_000001/advantages", 0.25, **{"reward": 0.4, "running/x/mean": 0.5})
    seconds = {"rollouts": 0.0, "rewards": 0.0, "advantages": 0.25, "update": 0.5}
    expected = {"reward": 0.4, "kl": 0.1, "step_time": 0.75, **{f"seconds/{stage}": s for stage, s in seconds.items()}}
    assert gather_metrics((), scored, UPDATE, None) == expected


def test_guardrails_have_a_metric_each_where_they_apply() -> None:
    guardrails = {
        "jpeg": artifact("c", 7.0, **{"rewards/jpeg/mean": 0.3, "rewards/jpeg/null": 1.0}),
        "words": artifact("d", 7.0, **{"rewards/words/null": 4.0}),  # it applied to no sample
    }
    metrics = gather_metrics((), ADVANTAGES, UPDATE, evaluation(guardrails))
    assert metrics["guardrails/jpeg"] == 0.3
    assert not [name for name in metrics if "words" in name or name.startswith("rewards")]
    assert metrics["step_time"] == 0.25 + 0.5


def rewrite(store: ArtifactStore, metrics: dict[str, float], wall_time: float = 2.0) -> None:
    write_metrics(store, 1, with_earlier(metrics, read_metrics(store, 1), wall_time))


def test_an_evaluation_and_the_time_on_the_clock_of_an_earlier_start_stay(store: ArtifactStore) -> None:
    rewrite(store, {"reward": 0.5, "heldout_reward": 0.7, "guardrails/jpeg": 0.3}, 9.0)
    rewrite(store, {"reward": 0.6})
    assert kept(store) == {"reward": 0.6, "heldout_reward": 0.7, "guardrails/jpeg": 0.3, "wall_time": 9.0}
    rewrite(store, {"reward": 0.6, "heldout_reward": 0.8})
    assert kept(store)["heldout_reward"] == 0.8


def test_no_flipped_or_missing_byte_of_a_table_changes_a_heldout_reward(store: ArtifactStore) -> None:
    place = Path(store.path("iteration_000001/metrics.parquet"))
    write_metrics(store, 1, {"reward": 0.5, "heldout_reward": 0.7})
    whole = place.read_bytes()
    chance, outcomes = random.Random(5), []
    for position in [*(chance.randrange(len(whole)) for _ in range(60)), None]:
        damaged = bytearray(whole)
        if position is None:
            damaged = damaged[: len(damaged) // 2]
        else:
            damaged[position] ^= 1 << chance.randrange(8)
        place.write_bytes(damaged)
        rewrite(store, {"reward": 0.6})
        assert kept(store) in ({"reward": 0.6, "wall_time": 2.0}, {"reward": 0.6, "heldout_reward": 0.7})
        outcomes.append("damaged" if "wall_time" in kept(store) else "read")
    assert outcomes.count("damaged") > 30
    assert outcomes[-1] == "damaged"


def read(maker: RunMaker, shown: int | None = None) -> RunView:
    return read_run(RunReader(maker.store), shown)


def test_a_finished_run_and_one_that_has_only_begun(tmp_path: Path) -> None:
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
    assert run.shown.iteration == 2
    assert run.shown.metrics["step_time"] == 10.0
    assert run.shown.metrics["heldout_reward"] == 0.75
    assert run.damages == ()
    run = read(RunMaker(tmp_path, "begun"))
    assert (run.policy_version, run.policy_digest, run.shown) == (0, "base" * 16, None)
    assert run.seconds["total"] == 0


def test_a_run_killed_in_its_second_iteration_or_round(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, planned=5)
    maker.iteration(1)
    maker.rollouts("iteration_000002", "i000002")
    # Moved to its place, its manifest not yet written.
    (maker.folder / "iteration_000002/rewards/ssim").mkdir(parents=True)
    run = read(maker)
    assert not run.finished
    assert run.policy_version == 1
    assert [tuple(view.stages) for view in run.iterations][1] == ("rollouts",)
    assert run.shown.iteration == 1  # the last one whose images have rewards
    assert run.damages == ()
    maker = RunMaker(tmp_path, "redrawn")
    maker.draw("iteration_000001", 1, "i000001", ["i000001"])
    maker.rollouts("iteration_000001/round_02", "i000001.d02")
    (view,) = read(maker).iterations
    assert (view.rounds, len(view.stages["rewards"]), view.complete) == (2, 1, False)
    assert view.metrics["num_tokens"] == 16.0  # of the round that has advantages


def test_guardrails_by_label(tmp_path: Path) -> None:
    maker = whole_run(tmp_path)
    for version, label, mean in ((0, "jpeg", 0.5), (2, "jpeg", 0.25), (2, "words", 1.0)):
        maker.guardrail(version, label, mean)
    run = read(maker)
    assert run.guardrail_series == {"jpeg": [(0.0, 0.5), (2.0, 0.25)], "words": [(2.0, 1.0)]}
    assert run.heldout_series() == [(0.0, 0.5), (2.0, 0.75)]
    assert run.damages == ()


def test_damaged_stages_are_left_out_and_named(tmp_path: Path) -> None:
    maker = whole_run(tmp_path, labels=("x", "y"))
    damaged = [f"iteration_{place}" for place in ("000001/rollouts", "000002/advantages", "000002/rewards/x")]
    files = [sorted((maker.folder / place).iterdir())[0] for place in damaged]
    for file in files:
        flip_last_byte(file)
    run = read(maker)
    assert {damage.place for damage in run.damages} == {str(file.relative_to(maker.folder)) for file in files}
    assert [tuple(view.stages) for view in run.iterations] == [
        ("rewards", "advantages", "update"),
        ("rollouts", "rewards", "update"),
    ]
    assert [reference.folder for reference in run.iterations[1].stages["rewards"]] == ["iteration_000002/rewards/y"]
    assert [len(run.series(f"rewards/{label}/mean")) for label in "xy"] == [1, 2]


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
def test_metrics_come_from_the_stages(tmp_path: Path, place: str, content: bytes | None) -> None:
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


def made(rows: int, **metrics: float) -> ArtifactRef:
    return artifact("x", 0.0, rows, **{name.replace("__", "/"): value for name, value in metrics.items()})


def test_counts_are_summed_extremes_taken_and_means_weighted_by_samples() -> None:
    first = made(6, tokens=7.0, completions__min_length=2.0, completions__max_length=5.0, rewards__a__mean=0.5)
    second = made(2, tokens=3.0, completions__min_length=1.0, completions__max_length=4.0, rewards__a__mean=0.9)
    assert pool_rounds([first, second]) == {
        "tokens": 10.0,
        "completions/min_length": 1.0,
        "completions/max_length": 5.0,
        "rewards/a/mean": 0.6,
    }
    assert pool_rounds([made(6, rewards__a__mean=0.5, rewards__a__null=1.0), made(2, rewards__a__null=2.0)]) == {
        "rewards/a/mean": 0.5,
        "rewards/a/null": 3.0,
    }


def test_what_functions_report_has_its_own_name_unless_the_run_has_a_metric_of_it() -> None:
    """Means over two functions that report the same, and over two rounds of 6 and 2 rows."""
    stages = {
        ("rollouts", ""): [made(6, entropy=1.5), made(2, entropy=1.5)],
        ("rewards", "a"): [made(6, logged__share=0.5, logged__entropy=9.0), made(2, logged__share=0.9)],
        ("rewards", "b"): [made(6, logged__share=0.2, logged__answer__std=3.0), made(2, logged__answer__std=1.0)],
    }
    found = stage_metrics(stages, None, sampling="rollouts")
    expected = {"entropy": 1.5, "logged/entropy": 9.0, "share": (0.6 + 0.2) / 2, "answer/std": 2.5}
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)
    assert "logged/share" not in found


def test_means_and_deviations_are_those_of_all_scored_samples_together() -> None:
    """Each round also has samples that the reward does not apply to, one in the first and three in the second."""
    first, second = [0.1, 0.5, 0.9], [0.2, 0.3]
    rounds = [
        made(
            len(values) + nulls,
            rewards__a__mean=statistics.fmean(values),
            rewards__a__std=statistics.stdev(values),
            rewards__a__null=float(nulls),
        )
        for values, nulls in ((first, 1), (second, 3))
    ]
    assert pool_rounds(rounds) == pytest.approx(
        {
            "rewards/a/mean": statistics.fmean([*first, *second]),
            "rewards/a/std": statistics.stdev([*first, *second]),
            "rewards/a/null": 4.0,
        }
    )


def test_a_bucket_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, bucket = whole_run(tmp_path), MemoryFileSystem()
    near = Path(made.store.path())
    root = f"/{tmp_path.name}"
    bucket.put(str(near), f"{root}/{near.name}", recursive=True)
    asked: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(MemoryFileSystem, name)

        def call(*given: Any, **options: Any) -> Any:
            asked[name] += 1
            return real(*given, **options)

        return call

    far = ArtifactStore(f"memory:/{root}", near.name)
    for name in ("find", "exists", "size"):
        monkeypatch.setattr(MemoryFileSystem, name, counted(name))
    view, here = read_run(RunReader(far)), read(made)
    assert asked == {"find": 1}
    assert (view.series("reward"), view.heldout_series()) == (here.series("reward"), here.heldout_series())
    assert (view.damages, view.moved) == (here.damages, here.moved)
    # A file that is gone is named, and one that came after the listing is found.
    scores = "iteration_000001/rewards"
    reader = RunReader(far)
    reader.list_files()
    table = next(path for path in bucket.glob(f"{root}/{near.name}/{scores}/*/*.parquet"))
    del reader._sizes[table.removeprefix(f"{root}/{near.name}/")]
    assert reader.find(table.removeprefix(f"{root}/{near.name}/").rpartition("/")[0]) is not None
    bucket.rm(table)
    assert [damage.reason for damage in read_run(RunReader(far)).damages] == ["it is missing"]
