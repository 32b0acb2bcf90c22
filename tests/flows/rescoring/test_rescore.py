"""Stored rollouts scored again: what is computed, what is kept, what is told, and what is refused."""

import asyncio
import contextvars
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows.command_line.main import application
from flows.replay.replay import replay
from flows.replay.request import ReplayRequest, plan_replay
from flows.rescoring.request import RescoreRequest, plan_rescore
from flows.rescoring.rescore import RescoreSummary, rescore
from flows.rewards.analysis import AnalysisRequest, analyse_rewards
from grpo_core.errors import InputError, InputErrors
from tasks.progress import listen
from tasks.rewards import score as score_reward
from tests.flows.conftest import Heard, Runs, Start

SSIM, PSNR = {"reward": "ssim", "weight": 0.5}, {"reward": "psnr", "weight": 0.5}
JPEG = {"reward": "jpeg", "settings": {"direction": "compressible"}}


def rewards_file(runs: Runs, *rewards: Mapping[str, object], **others: object) -> Path:
    path = runs.root.parent / "rewards.yaml"
    path.write_text(yaml.safe_dump({"rewards": [dict(reward) for reward in rewards], **others}))
    return path


def scored_again(
    runs: Runs, *rewards: Mapping[str, object], name: str = "other", sources: tuple[str, ...] = ("run",), **options: Any
) -> tuple[RescoreSummary, Heard]:
    others = {"advantages": options.pop("advantages")} if "advantages" in options else {}
    file = rewards_file(runs, *rewards, **others)
    plan = plan_rescore(RescoreRequest(sources, file, name, root=str(runs.root), **options))
    heard = Heard([], [])

    def body() -> RescoreSummary:
        listen(heard)
        return asyncio.run(rescore(plan)).summary

    return contextvars.copy_context().run(body), heard


def refused(runs: Runs, *rewards: Mapping[str, object], **options: Any) -> list[str]:
    """What is told of a rescoring that must not begin."""
    before = content(runs)
    with pytest.raises((InputError, InputErrors)) as caught:
        scored_again(runs, *rewards, **options)
    assert content(runs) == before
    errors = caught.value.errors if isinstance(caught.value, InputErrors) else (caught.value,)
    return [str(error) for error in errors]


def content(runs: Runs, run: str = "run") -> dict[str, str]:
    """Every file of the run that is not a rescoring's, with its sha256."""
    paths = [path for path in runs.path(run=run).rglob("*") if path.is_file()]
    own = [path for path in paths if not {"rescored", "analysis", ".stages", ".incoming"} & set(path.parts)]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in own}


def advantages(runs: Runs, *parts: str) -> pl.DataFrame:
    return pl.read_parquet(runs.path(*parts, "iteration_000001", "advantages", "advantages.parquet"))


def scoring(heard: Heard) -> list[str]:
    return sorted(stage for stage in heard.stages if "score" in stage)


def test_other_weights_cost_no_scoring_and_give_the_definition(finished: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_reward, "score_rows", None)
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
    figures = summary.comparison["combined"]
    assert figures["after"]["mean"] == pytest.approx(
        pl.concat(
            [
                pl.read_parquet(finished.path("rescored", "other", f"iteration_{n:06d}", "advantages", "*.parquet"))
                for n in (1, 2)
            ]
        )["reward"].mean()
    )


def test_the_same_rewards_give_the_same_advantages_and_the_replay_of_them_the_same_policy(
    finished: Runs, undisturbed: tuple[Runs, Start]
) -> None:
    summary, _ = scored_again(finished, SSIM, PSNR, name="same")
    assert advantages(finished, "rescored", "same").equals(advantages(finished))
    assert summary.comparison["advantages"]["turned"] == 0.0
    plan = plan_replay(ReplayRequest("run", root=str(finished.root), advantages="same"))
    assert asyncio.run(replay(plan)).policy_digest == undisturbed[1].summary.policy_digest
    # Other weights push elsewhere.
    scored_again(finished, {**SSIM, "weight": -1.0}, name="against")
    plan = plan_replay(ReplayRequest("run", root=str(finished.root), advantages="against", name="opposed"))
    assert asyncio.run(replay(plan)).policy_digest != undisturbed[1].summary.policy_digest


def test_one_reward_more_computes_that_one_and_later_rescorings_take_it_from_there(finished: Runs) -> None:
    summary, heard = scored_again(finished, SSIM, PSNR, JPEG, name="three")
    assert scoring(heard) == ["iteration 1: score jpeg", "iteration 2: score jpeg"]
    assert summary.computed == {"ssim": 0, "psnr": 0, "jpeg": 8}
    again, heard = scored_again(finished, {**JPEG, "name": "small", "clamp": [0.0, 0.9]}, SSIM, name="two")
    assert scoring(heard) == []
    assert again.computed == {"small": 0, "ssim": 0}
    other, heard = scored_again(finished, {"reward": "jpeg", "settings": {"quality": 40}}, name="coarse")
    assert other.computed == {"jpeg": 8}
    report = json.loads(finished.path("rescored", "three", "report.json").read_text())
    assert report["runs"] == ["run"]
    page = finished.path("rescored", "three", "report.html").read_text()
    assert page.count("data:image/png") >= 1
    assert "://" not in page.replace("http://www.w3.org", "")


def test_a_rescoring_changed_under_its_name_leaves_no_former_advantages(finished: Runs) -> None:
    scored_again(finished, SSIM, name="one")
    whole = advantages(finished, "rescored", "one")
    scored_again(finished, PSNR, name="one", iterations="2")
    assert not finished.path("rescored", "one", "iteration_000001", "advantages.manifest.json").exists()
    assert "the rewards of the rescoring one changed" in finished.reasons()[-1]
    (kept,) = finished.path("previous").rglob("one/iteration_000001/advantages/advantages.parquet")
    assert pl.read_parquet(kept).equals(whole)
    with pytest.raises(InputErrors, match=r"iteration_000001/advantages"):
        plan_replay(ReplayRequest("run", root=str(finished.root), advantages="one"))


def test_several_runs_are_compared_together_and_each_keeps_its_own(finished: Runs) -> None:
    finished.start("second", run__seed=5)
    html = finished.root.parent / "both.html"
    summary, _ = scored_again(finished, SSIM, sources=("run", "second"), html=html)
    assert (summary.runs, summary.samples, summary.iterations) == (["run", "second"], 16, 4)
    for run in summary.runs:
        assert finished.path("rescored", "other", "iteration_000002", "advantages", run=run).is_dir()
        assert finished.path("rescored", "other", "report.html", run=run).read_text() == html.read_text()


def test_running_moments_go_from_iteration_to_iteration(finished: Runs) -> None:
    scored_again(finished, {"reward": "ssim", "normalize": "running"}, name="running", advantages={"scale": "none"})
    seen: list[float] = []
    for iteration in (1, 2):
        folder = finished.path("rescored", "running", f"iteration_{iteration:06d}", "advantages")
        table = pl.read_parquet(folder / "advantages.parquet")
        seen += table["reward"].to_list()
        known = pl.Series(seen)
        std = known.std()
        assert isinstance(std, float)
        for group in table.partition_by("group_id"):
            centred = group["reward"] - group["reward"].mean()
            assert group["advantage"].to_list() == pytest.approx((centred / (std + 1e-4)).to_list(), rel=1e-5)


@pytest.mark.parametrize(
    ("rewards", "options", "told"),
    [
        (({"reward": "sim"},), {}, r"rewards.0: rewards: got 'sim'. There is no such reward. Did you mean ssim"),
        (({"reward": "ssim", "weigth": 1.0},), {}, "There is no such key: did you mean weight"),
        (({"reward": "answer"},), {}, "It scores texts, and policy.kind glm_image makes images"),
        (({**SSIM, "weight": 0.0},), {}, "nothing would be learned"),
        ((SSIM, SSIM), {}, "This name stands twice"),
        (({"reward": "lpips"},), {}, "alexnet-owt-7be5be79.pth"),
        ((JPEG, {**JPEG, "name": "signs", "where": {"kind": ["sign"]}}), {}, "No prompt of run has this column"),
        ((SSIM,), {"name": "stored"}, "grpo replay has a meaning of its own"),
        ((SSIM,), {"name": "../up"}, "It becomes a folder"),
        ((SSIM,), {"sources": ("run", "run")}, "A run stands twice"),
        ((SSIM,), {"sources": ("rum",)}, "rum"),
        ((SSIM,), {"iterations": "2-9"}, "no complete iteration 3"),
        ((SSIM,), {"iterations": "two"}, "Write the first and the last"),
        ((SSIM,), {"advantages": {"kl_coef": 0.1}}, "hold no log-probs of the reference"),
        ((SSIM,), {"html": Path("report.pdf")}, "ends in .html"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    finished: Runs, rewards: tuple[dict[str, object], ...], options: dict[str, Any], told: str
) -> None:
    assert any(told in message for message in refused(finished, *rewards, **options)), told


def test_a_missing_file_of_rewards_is_told_by_the_program(finished: Runs) -> None:
    arguments = ["rescore", "run", "--rewards", "nowhere.yaml", "--name", "x", "--root", str(finished.root)]
    result = CliRunner().invoke(application, arguments)
    assert result.exit_code == 2
    assert "--rewards: got 'nowhere.yaml'" in result.output


def test_damaged_rollouts_are_refused_by_name(finished: Runs) -> None:
    path = finished.path("iteration_000002", "rollouts", "part-00000.parquet")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(InputErrors, match="iteration_000002/rollouts"):
        scored_again(finished, SSIM)


def test_the_laboratory_looks_at_what_was_trained_on_and_at_a_rescoring(finished: Runs) -> None:
    before = content(finished)
    summary, analysis = analyse_rewards(AnalysisRequest("run", root=str(finished.root)))
    assert content(finished) == before
    assert {reward.label for reward in analysis.rewards} == {"ssim", "psnr"}
    assert analysis.samples == 8
    noises = [reward.noise for reward in analysis.rewards]
    assert [noise and noise.max_difference for noise in noises] == [0.0, 0.0]
    assert summary.not_repeated == {}
    names = {path.name for path in finished.path("analysis").iterdir()}
    assert {"report.html", "report.json", "histograms.png", "agreement.png", "trend.png", "cost.png"} <= names
    scored_again(finished, JPEG, name="jpeg")
    _, analysis = analyse_rewards(AnalysisRequest("run", root=str(finished.root), rescored="jpeg", repeats=0))
    assert [(reward.label, reward.noise) for reward in analysis.rewards] == [("jpeg", None)]
    with pytest.raises(InputErrors, match="--advantages: got 'jpg'"):
        analyse_rewards(AnalysisRequest("run", root=str(finished.root), rescored="jpg"))


def function_file(runs: Runs, body: str) -> dict[str, object]:
    """A reward that is a person's own function; its values are what the body says of `names`."""
    path = runs.root.parent / "mine.py"
    source = f"import math\nfrom pathlib import Path\n\ndef score(prompts, completions, **columns):\n    {body}\n"
    path.write_text(source)
    return {"reward": "function", "name": "mine", "settings": {"function": f"{path}:score"}}


def test_failures_are_tried_again_under_the_same_name_and_then_no_more(finished: Runs) -> None:
    healed = finished.root.parent / "healed"
    body = f"return [0.5 if i or Path({str(healed)!r}).exists() else math.nan for i in range(len(prompts))]"
    mine = {**function_file(finished, body), "max_failures": 0.3}
    first, _ = scored_again(finished, mine)
    assert (first.computed, first.failed) == ({"mine": 8}, {"mine": 2})
    healed.touch()
    second, heard = scored_again(finished, mine)
    assert (second.computed, second.failed) == ({"mine": 2}, {"mine": 0})
    assert scoring(heard) == ["iteration 1: score mine", "iteration 2: score mine"]
    third, heard = scored_again(finished, mine)
    assert (third.computed, third.failed, scoring(heard)) == ({"mine": 0}, {"mine": 0}, [])


def test_running_moments_need_the_iterations_before(finished: Runs) -> None:
    running = {"reward": "ssim", "normalize": "running"}
    (told,) = refused(finished, running, iterations="2")
    assert "--iterations: got '2-2'. The running moments of ssim need every iteration before" in told


def test_runs_of_one_name_under_two_roots_are_refused(finished: Runs) -> None:
    other = Runs(finished.root.parent / "elsewhere")
    shutil.copytree(finished.root, other.root)
    (told,) = refused(finished, SSIM, sources=("run", str(other.path())))
    assert "A report tells runs apart by their names" in told


def test_a_server_that_does_not_answer_is_told_before_any_work(finished: Runs) -> None:
    before = content(finished)
    options = ["--rewards", str(rewards_file(finished, SSIM)), "--name", "late", "--root", str(finished.root)]
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        ended = CliRunner().invoke(application, ["rescore", "run", *options])
    assert ended.exit_code == 2, ended.output
    assert ended.stderr.startswith("error: PREFECT_API_URL: got 'http://127.0.0.1:9/api'. No server answers there")
    assert content(finished) == before
