"""A run whose reward is a service that breaks down half-way: nothing stored is lost, and the run goes on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import polars as pl
import pytest

from flows.rewards.server import create_app
from grpo_core.errors import FailedSamplesError
from grpo_core.rewards.text.answer import AnswerReward
from tests.flows.conftest import Runs, Start
from tests.flows.rewards.test_server import serving_app

BATCH = 4


class Mortal:
    """The server's application; after so many answers it breaks down over every request."""

    def __init__(self, answers: int) -> None:
        self.app: Any = create_app({"answer": AnswerReward()})
        self.left = answers

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["path"] == "/v1/score":
            self.left -= 1
            if self.left < 0:
                raise ConnectionAbortedError("broken down")
        await self.app(scope, receive, send)


@contextmanager
def service(answers: int) -> Iterator[tuple[str, Mortal]]:
    mortal = Mortal(answers)
    with serving_app(mortal) as url:
        yield url, mortal


def start(runs: Runs, url: str, *, max_failures: float = 0.1, iterations: int = 3) -> Start:
    remote = {"url": url, "reward": "answer", "attempts": 2, "backoff_s": 0.01, "timeout_s": 5.0}
    settings: dict[str, Any] = {
        "run__iterations": iterations,
        "rollout__prompts_per_iteration": 2,
        "rollout__group_size": 8,
        "rollout__prompts_per_batch": 2,
        "update__minibatch_size": 16,
        "update__micro_batch_size": 16,
        "evaluate__prompts": None,
        "rewards": [
            {
                "reward": "remote",
                "settings": {**remote, "batch_size": BATCH, "concurrency": 1},
                "max_failures": max_failures,
            },
            {"reward": "answer"},
        ],
    }
    return runs.start_text(**settings)


def scores(runs: Runs, iteration: int, label: str) -> pl.DataFrame:
    return pl.read_parquet(runs.path(f"iteration_{iteration:06d}", "rewards", label, "scores.parquet", run="text"))


@pytest.mark.slow
def test_the_run_stops_by_name_keeps_what_it_has_and_goes_on_when_the_service_is_back(empty: Runs) -> None:
    with service(answers=10_000) as (url, mortal):
        undisturbed = start(Runs(empty.root / "golden"), url)
        # Four requests an iteration: the second iteration gets half of its answers.
        mortal.left = 6
        with pytest.raises(FailedSamplesError, match=r"reward remote: 8 of 16 .* max_failures 0\.1 .*status 500"):
            start(empty, url)
        second = empty.path("iteration_000002", run="text")
        assert not (second / "rewards" / "remote.manifest.json").exists()
        assert (second / "rollouts.manifest.json").exists()
        assert (second / "rewards" / "answer.manifest.json").exists()
        mortal.left = 10_000
        again = start(empty, url)
    assert again.stages[0] == "iteration 2: score remote"
    assert not {"iteration 2: collect rollouts", "iteration 2: score answer"} & set(again.stages)
    assert again.summary.policy_digest == undisturbed.summary.policy_digest
