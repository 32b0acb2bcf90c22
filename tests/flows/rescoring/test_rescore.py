"""Stored rollouts scored again: what is computed, what is reused, what is reported, and what is refused."""

import asyncio
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from configs.validation import validated
from flows.replaying import plan_replay
from flows.requests import RescoreRequest
from flows.rescoring.plan import plan_rescore
from flows.rescoring.rescore import RescoreSummary, rescore
from flows.rewards.analyse import analyse_rewards
from tasks.rewards import score_rewards
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import Heard, Runs, Start, flip, heard_of, refused, sha256_of
from tests.flows.replaying.test_replaying import request_replay, run_replay

SSIM, PSNR = {"reward": "ssim", "weight": 0.5}, {"reward": "psnr", "weight": 0.5}
JPEG = {"reward": "jpeg", "settings": {"direction": "compressible"}}


def rewards_file(runs: Runs, *rewards: Mapping[str, object], **others: object) -> Path:
    path = runs.root.parent / "rewards.yaml"
    path.write_text(yaml.safe_dump({"rewards": [dict(reward) for reward in rewards], **others}))
    return path


def request_rescore(
    runs: Runs, *rewards: Mapping[str, object], name: str = "other", sources: tuple[str, ...] = ("run",), **options: Any
) -> RescoreRequest:
    others = {"advantages": options.pop("advantages")} if "advantages" in options else {}
    values = {"sources": list(sources), "rewards": str(rewards_file(runs, *rewards, **others)), "name": name}
    return validated(RescoreRequest, {"root": str(runs.root), **values, **options})


def scored_again(runs: Runs, *rewards: Mapping[str, object], **options: Any) -> tuple[RescoreSummary, Heard]:
    return heard_of(lambda: asyncio.run(rescore(request_rescore(runs, *rewards, **options))).summary)


def content(runs: Runs) -> dict[str, str]:
    """Every file of the run that is not a rescoring's, with its sha256."""
    return sha256_of(runs.path(), "rescored", "analysis", ".stages", ".incoming")


def advantages(runs: Runs, *parts: str) -> pl.DataFrame:
    return pl.read_parquet(runs.path(*parts, "iteration_000001", "advantages", "advantages.parquet"))


def scoring(heard: Heard) -> list[str]:
    return sorted(stage for stage in heard.stages if "score" in stage)


def test_other_weights_cost_no_scoring_and_give_the_definition(finished: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_rewards, "score_rows", None)
    before = content(finished)
    summary, heard = scored_again(finished, {**SSIM, "weight": 0.2}, {**PSNR, "weight": 0.8})
    assert content(finished) == before
    assert scoring(heard) == []
    assert (summary.computed, summary.samples, summary.iterations) == ({"ssim": 0, "psnr": 0}, 8, 2)
    scores = {
        label: pl.read_parquet(finished.path("iteration_000001", "rewards", label, "scores.parquet"))
        for label in ("ssim", "psnr")
    }
    expected = 0.2 * scores["ssim"]["value"] + 0.8 * scores["psnr"]["value"]
    assert advantages(finished, "rescored", "other")["reward"].to_list() == pytest.approx(expected.to_list())
    combined = summary.comparison["combined"]
    assert combined["after"]["mean"] == pytest.approx(
        pl.concat(
            [
                pl.read_parquet(finished.path("rescored", "other", f"iteration_{n:06d}", "advantages", "*.parquet"))
                for n in (1, 2)
            ]
        )["reward"].mean()
    )


def test_a_replay_learns_from_the_advantages_of_a_rescoring(finished: Runs) -> None:
    """Those of the same rewards give the same policy, and of others another one."""
    summary, _ = scored_again(finished, SSIM, PSNR, name="same")
    assert advantages(finished, "rescored", "same").equals(advantages(finished))
    assert summary.comparison["advantages"]["turned"] == 0.0
    replayed, _ = run_replay(finished, advantages="same", iterations="1")
    assert replayed.policy_digest == finished.policy_digest(1)
    scored_again(finished, {**SSIM, "weight": -0.5}, name="turned")
    turned, _ = run_replay(finished, advantages="turned", iterations="1", name="turned")
    assert turned.policy_digest != replayed.policy_digest


def test_one_reward_more_computes_that_one_and_later_rescorings_take_it_from_there(finished: Runs) -> None:
    # Heavy enough that samples change places, which the page shows.
    summary, heard = scored_again(finished, SSIM, PSNR, {**JPEG, "weight": 100.0}, name="three")
    assert scoring(heard) == ["iteration 1: score jpeg", "iteration 2: score jpeg"]
    assert summary.computed == {"ssim": 0, "psnr": 0, "jpeg": 8}
    again, heard = scored_again(finished, {**JPEG, "name": "small", "clamp": [0.0, 0.9]}, SSIM, name="two")
    assert scoring(heard) == []
    assert again.computed == {"small": 0, "ssim": 0}
    report = json.loads(finished.path("rescored", "three", "report.json").read_text())
    assert report["runs"] == ["run"]
    page = finished.path("rescored", "three", "report.html").read_text()
    assert page.count("data:image/webp") >= 1
    assert "://" not in page.replace("http://www.w3.org", "")


def test_a_rescoring_changed_under_its_name_leaves_no_previous_advantages(finished: Runs) -> None:
    scored_again(finished, SSIM, name="one")
    whole = advantages(finished, "rescored", "one")
    scored_again(finished, PSNR, name="one", iterations="2")
    assert not finished.path("rescored", "one", "iteration_000001", "advantages.manifest.json").exists()
    assert "the rewards of the rescoring one changed" in finished.reasons()[-1]
    (kept,) = finished.path("quarantine").rglob("one/iteration_000001/advantages/advantages.parquet")
    assert pl.read_parquet(kept).equals(whole)
    for use in (
        lambda: plan_replay(request_replay(finished, advantages="one")),
        lambda: analyse_rewards("run", root=str(finished.root), rescored="one"),
    ):
        (error,) = refused(use)
        assert (error.place, error.value) == ("run/rescored/one", "1 of 2 iterations")


def test_a_rescoring_whose_reward_is_refused_is_none(finished: Runs) -> None:
    path = finished.root.parent / "mine.py"
    path.write_text("def score(prompts, completions, **columns):\n    return [1.0]\n")
    mine = {"reward": "function", "name": "mine", "settings": {"function": f"{path}:score"}}
    error, *_ = refused(lambda: scored_again(finished, mine, name="bad"))
    assert error.value == "1 rewards"
    (error,) = refused(lambda: analyse_rewards("run", root=str(finished.root), rescored="bad"))
    assert (error.place, error.value) == ("--rescored", "bad")
    assert RunReader(ArtifactStore(str(finished.root), "run")).rescorings() == []


@pytest.mark.slow
def test_several_runs_are_compared_together_and_each_keeps_its_own(finished: Runs) -> None:
    finished.start("second", run__seed=5)
    html = finished.root.parent / "both.html"
    summary, _ = scored_again(finished, SSIM, sources=("run", "second"), html=str(html))
    assert (summary.runs, summary.samples, summary.iterations) == (["run", "second"], 16, 4)
    for run in summary.runs:
        assert finished.path("rescored", "other", "iteration_000002", "advantages", run=run).is_dir()
        assert finished.path("rescored", "other", "report.html", run=run).read_text() == html.read_text()


def test_running_moments_go_from_iteration_to_iteration(finished: Runs) -> None:
    scored_again(finished, {"reward": "ssim", "normalize": "running"}, name="running", advantages={"scale": "none"})
    folders = [finished.path("rescored", "running", f"iteration_{number:06d}", "advantages") for number in (1, 2)]
    first, second = (pl.read_parquet(folder / "advantages.parquet") for folder in folders)
    std = pl.concat([first["reward"], second["reward"]]).std()
    assert isinstance(std, float)
    for group in second.partition_by("group_id"):
        centred = group["reward"] - group["reward"].mean()
        assert group["advantage"].to_list() == pytest.approx((centred / (std + 1e-4)).to_list(), rel=1e-5)


WRONG: list[tuple[tuple[dict[str, object], ...], dict[str, Any], str, object]] = [
    (({"reward": "sim"},), {}, "rewards.0.reward", "sim"),
    (({"reward": "ssim", "weigth": 1.0},), {}, "rewards.0.weigth", "weigth"),
    (({"reward": "answer"},), {}, "rewards.0.reward", "answer"),
    (({**SSIM, "weight": 0.0},), {}, "rewards", [0.0]),
    ((SSIM, SSIM), {}, "rewards", "ssim"),
    (({"reward": "lpips"},), {}, "rewards.lpips.weights", None),
    ((JPEG, {**JPEG, "name": "signs", "where": {"kind": ["sign"]}}), {}, "rewards.1.signs", "kind"),
    ((SSIM,), {"name": "stored"}, "--name", "stored"),
    ((SSIM,), {"name": "../up"}, "name", "../up"),
    ((SSIM,), {"sources": ("run", "run")}, "RUN", ["run", "run"]),
    ((SSIM,), {"sources": ("rum",)}, "RUN", "rum"),
    ((SSIM,), {"iterations": "2-9"}, "--iterations", "2-9"),
    ((SSIM,), {"iterations": "two"}, "--iterations", "two"),
    (({"reward": "ssim", "normalize": "running"},), {"iterations": "2"}, "--iterations", "2-2"),
    ((SSIM,), {"advantages": {"kl_coef": 0.1}}, "advantages.kl_coef", 0.1),
    ((SSIM,), {"html": "report.pdf"}, "--html", "report.pdf"),
]


def test_each_mistake_is_refused_before_anything_is_written(undisturbed: tuple[Runs, Start]) -> None:
    runs, _ = undisturbed
    before = content(runs)
    for rewards, options, place, value in WRONG:
        (error,) = refused(
            lambda rewards=rewards, options=options: plan_rescore(request_rescore(runs, *rewards, **options))
        )
        assert (error.place, error.value) == (place, value)
    request = request_rescore(runs, SSIM)
    (error,) = refused(lambda: plan_rescore(request.model_copy(update={"rewards": "nowhere.yaml"})))
    assert (error.place, error.value) == ("--rewards", "nowhere.yaml")
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        (error,) = refused(lambda: plan_rescore(request))
    assert error.place == "PREFECT_API_URL"
    assert content(runs) == before


def test_runs_with_one_name_under_two_roots_are_refused(finished: Runs) -> None:
    other = Runs(finished.root.parent / "elsewhere")
    shutil.copytree(finished.root, other.root)
    (error,) = refused(lambda: plan_rescore(request_rescore(finished, SSIM, sources=("run", str(other.path())))))
    assert (error.place, error.value) == ("RUN", ["run"])


def test_damaged_rollouts_are_refused_by_name(finished: Runs) -> None:
    flip(finished.path("iteration_000002", "rollouts", "part-00000.parquet"))
    (error,) = refused(lambda: plan_rescore(request_rescore(finished, SSIM)))
    assert error.place == "run/iteration_000002/rollouts"


def test_the_laboratory_looks_at_what_was_trained_on_and_at_a_rescoring(finished: Runs) -> None:
    before = content(finished)
    summary = analyse_rewards("run", root=str(finished.root))
    assert content(finished) == before
    assert {reward["label"] for reward in summary.analysis["rewards"]} == {"ssim", "psnr"}
    assert summary.analysis["samples"] == 8
    assert [reward["noise"]["max_difference"] for reward in summary.analysis["rewards"]] == [0.0, 0.0]
    assert summary.not_repeated == {}
    assert {path.name for path in finished.path("analysis").iterdir()} == {"report.html", "report.json"}
    scored_again(finished, JPEG, name="jpeg")
    analysis = analyse_rewards("run", root=str(finished.root), rescored="jpeg", repeats=0).analysis
    assert [(reward["label"], reward["noise"]) for reward in analysis["rewards"]] == [("jpeg", None)]
    (error,) = refused(lambda: analyse_rewards("run", root=str(finished.root), rescored="jpg"))
    assert error.value == "jpg"
