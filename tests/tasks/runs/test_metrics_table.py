"""An iteration's metrics in one table."""

import io
import random
from pathlib import Path

import polars as pl

from tasks.runs.metrics_table import gather_metrics, read_metrics, with_earlier, write_metrics
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore


def artifact(folder: str, seconds: float, rows: int = 1, **metrics: float) -> ArtifactRef:
    return ArtifactRef(
        uri=f"run/{folder}", sha256="a", digest="b", schema_version=4, rows=rows, seconds=seconds, metrics=metrics
    )


def kept(store: ArtifactStore) -> dict[str, float]:
    content = store.read_file("iteration_000001/metrics.parquet")
    assert content is not None
    table = pl.read_parquet(io.BytesIO(content))
    return dict(zip(table["metric"], table["value"], strict=True))


UPDATE = artifact("policies/000001", 0.5, kl=0.1)
ADVANTAGES = artifact("iteration_000001/advantages", 0.25, reward=0.4)


def test_metrics_of_all_stages_with_their_seconds() -> None:
    # The rewards are computed side by side, so the slowest is what the stage took.
    rewards = {
        "a": artifact("iteration_000001/rewards/a", 1.0, a=1.0),
        "b": artifact("iteration_000001/rewards/b", 0.75, b=2.0),
    }
    rounds = [SamplingRound(artifact("iteration_000001/rollouts", 2.0, tokens=80.0), rewards)]
    heldout = artifact("evaluations/000001/advantages", 9.0, reward=0.7)
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


def test_seconds_of_several_rounds_are_summed() -> None:
    # Each round's slowest reward counts.
    rounds = [
        SamplingRound(artifact("a", 2.0), {"x": artifact("b", 1.0), "y": artifact("c", 0.75)}),
        SamplingRound(artifact("d", 3.0), {"x": artifact("e", 0.5), "y": artifact("f", 0.75)}),
    ]
    metrics = gather_metrics(rounds, ADVANTAGES, UPDATE, None)
    assert (metrics["seconds/rollouts"], metrics["seconds/rewards"]) == (5.0, 1.0 + 0.75)


def test_speeds_count_all_rounds_and_memory_the_highest_of_them() -> None:
    rounds = [
        SamplingRound(artifact("a", 2.0, 8, **{"completions/mean_length": 5.0}), {}),
        SamplingRound(artifact("b", 3.0, 2, **{"completions/mean_length": 10.0}), {}),
    ]
    peaks = [
        each.rollouts.model_copy(update={"peak_memory": gib * 2**30}) for each, gib in zip(rounds, (3, 4), strict=True)
    ]
    rounds = [SamplingRound(each, {}) for each in peaks]
    metrics = gather_metrics(rounds, ADVANTAGES, UPDATE, None)
    assert (metrics["samples_per_second"], metrics["tokens_per_second"]) == (10 / 5, (40 + 20) / 5)
    assert {name: value for name, value in metrics.items() if "gpu" in name} == {"gpu_memory/rollouts": 4.0}


def test_speeds_count_the_tokens_of_a_draft_once_and_none_without_tokens() -> None:
    uneven = artifact("a", 2.0, 16, **{"completions/mean_length": 5.0, "completions/token_samples": 12.0})
    metrics = gather_metrics([SamplingRound(uneven, {})], ADVANTAGES, UPDATE, None)
    assert (metrics["samples_per_second"], metrics["tokens_per_second"]) == (16 / 2, 60 / 2)
    metrics = gather_metrics([SamplingRound(artifact("a", 2.0, 8), {})], ADVANTAGES, UPDATE, None)
    assert metrics["samples_per_second"] == 4.0
    assert not [name for name in metrics if "token" in name]


def test_a_replay_has_advantages_and_an_update_and_no_running_moments() -> None:
    scored = artifact("iteration_000001/advantages", 0.25, **{"reward": 0.4, "running/x/mean": 0.5})
    seconds = {"rollouts": 0.0, "rewards": 0.0, "advantages": 0.25, "update": 0.5}
    expected = {"reward": 0.4, "kl": 0.1, "step_time": 0.75, **{f"seconds/{stage}": s for stage, s in seconds.items()}}
    assert gather_metrics((), scored, UPDATE, None) == expected


def test_guardrails_have_a_metric_each_where_they_apply() -> None:
    heldout = artifact("evaluations/000001/advantages", 9.0, reward=0.7)
    guardrails = {
        "jpeg": artifact("c", 7.0, **{"rewards/jpeg/mean": 0.3, "rewards/jpeg/null": 1.0}),
        "words": artifact("d", 7.0, **{"rewards/words/null": 4.0}),  # it applied to no sample
    }
    metrics = gather_metrics((), ADVANTAGES, UPDATE, heldout, guardrails)
    assert metrics["guardrails/jpeg"] == 0.3
    assert not [name for name in metrics if "words" in name or name.startswith("rewards")]
    assert metrics["step_time"] == 0.25 + 0.5


def rewrite(store: ArtifactStore, metrics: dict[str, float], wall_time: float = 2.0) -> None:
    """What another start of the run does with an iteration."""
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
