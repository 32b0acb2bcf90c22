"""The end of a training as it is printed: facts, lines of the log, the pace of the last iterations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from typer.testing import CliRunner

from configs.loader import read_config
from configs.schema import ReplaySection
from flows.command_line.main import application
from flows.training.callbacks import format_progress_line, format_sampling_time
from flows.training.history import TrainingHistory
from flows.training.summary import TrainSummary
from grpo_core.update.settings import PARITY_SHARE
from tasks.reports.iteration import IterationRecord
from tasks.reports.text import duration
from tasks.runs.run_view import Cost, EvaluationView
from tasks.storage.artifacts.reference import ArtifactRef
from tests.bench.sick_runs import SICK_RUNS, settings_of
from tests.flows.conftest import REPOSITORY, Runs, Start


def summary(**changes: Any) -> TrainSummary:
    known: dict[str, Any] = {
        "run": "r",
        "iterations": 3,
        "reward_first": 0.25,
        "reward_last": 0.75,
        "heldout_before": 0.5,
        "heldout_after": 0.375,
        "heldout_best": 0.625,
        "until_best": Cost(samples=1440, seconds=312.4),
        "samples_per_device_second": 0.30512,
        "heldout_baselines": {"blank": 0.125},
        "trained_on": None,
        "policy_digest": "0123456789abcdef0123",
        "seconds": {"total": 12.34, "rollouts": 5.0},
        "folder": "/elsewhere/r",
        "contact_sheet": None,
        "heldout_texts": None,
        "signs": [],
        "stopped_early": False,
        "quarantined": [],
        "reused": {},
        "pages": {},
    }
    return TrainSummary(**known | changes)


def facts(**changes: Any) -> dict[str, str]:
    return dict(summary(**changes).report().facts)


def test_rewards_times_and_where_to_look() -> None:
    assert facts(reused={"other": 2}) == {
        "reward, first → last iteration": "0.250 → 0.750 (+0.500)",
        "held-out reward, before → after": "0.500 → 0.375 (-0.125)",
        "held-out reward, blank images": "0.125",
        "seconds to the best held-out reward": "312 s, 1,440 samples: 0.625",
        "samples per device-second": "0.305",
        "seconds, this start": "12.3",
        "seconds, rollouts": "5.0",
        "reused from run other": "2 iterations",
        "policy digest": "0123456789abcdef",
        "stored in": "/elsewhere/r",
    }


def test_a_folder_below_the_working_directory_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert facts(folder=str(tmp_path / "runs" / "r"))["stored in"] == "runs/r"


def test_files_reasons_and_pages_are_named() -> None:
    named = {"contact_sheet": "/a/sheet", "heldout_texts": "/a/texts", "quarantined": ["a reason"]}
    assert {"/a/sheet", "/a/texts", "a reason"} <= {*facts(**named).values()}
    pages = {"last report": "http://host/1", "summary": "http://host/2"}
    assert [note.rsplit(" ", 1)[1] for note in summary(pages=pages).report().notes] == [*pages.values()]


ADVANTAGES = ArtifactRef(uri="r/a", sha256="", digest="", schema_version=1, rows=1, seconds=1.0, metrics={})
SECONDS = {"rollouts": 4.0, "rewards": 2.0, "advantages": 1.0, "update": 3.0}
RECORD = IterationRecord(2, (), ADVANTAGES, {"reward": 0.5, **{f"seconds/{name}": s for name, s in SECONDS.items()}})


@pytest.mark.parametrize(
    ("reused", "each", "end"),
    [
        ({}, None, "10.0 s"),
        ({}, 65.0, "10.0 s, about 1:02:50 left"),  # 58 times 65 s
        (dict.fromkeys(SECONDS, "tiny"), None, "reused from run tiny"),
        ({"rollouts": "tiny", "rewards": "tiny"}, None, "4.0 s, rollouts, rewards reused from run tiny"),
    ],
)
def test_the_end_of_a_line(reused: dict[str, str], each: float | None, end: str) -> None:
    line = format_progress_line(replace(RECORD, reused=reused), 60, each)
    assert line == f"iteration 2/60: reward 0.500, {end}"


def test_a_line_of_a_replay_says_whose_rewards_and_whose_iteration_it_has() -> None:
    record = replace(RECORD, iteration=7, metrics={"reward": 0.5, "heldout_reward": 0.25, "kl": 0.125})
    replay = ReplaySection(source="tiny", policy=5, iterations=(3, 4, 5), advantages="kinder", max_staleness=4)
    title, _, values = format_progress_line(record, 8, 30.0, replay).partition(": ")
    assert title == "policy 7 from iteration 4 of tiny (2/3)"
    assert values.split(", ") == [
        "reward (rescoring kinder) 0.500",
        "held-out (original rewards) 0.250",
        "KL 0.125",
        "about 0:00:30 left",
    ]


def test_stored_iterations_and_the_first_that_is_trained_do_not_count() -> None:
    history, paces = TrainingHistory(name="run", folder="runs/run"), []
    for stored, seconds in ((True, 900.0), (True, 900.0), (False, 100.0), (False, 10.0), (False, 20.0)):
        history.iterations.append(replace(RECORD, stored=stored, metrics={"wall_time": seconds}))
        paces.append(history.pace)
    assert paces == [None, None, None, 10.0, 15.0]
    history.evaluations.append(EvaluationView(0, {}, {}))
    del history.iterations[-2:]
    assert history.pace == 100.0


def test_samples_take_as_long_as_in_the_evaluation_before() -> None:
    """40 iterations of 16 x 8 samples, and 4 evaluations of 10, are 5,160: 516 times the 10 that took 7 s."""
    sampled, quick, slow = (ADVANTAGES.model_copy(update={"rows": 10, "seconds": each}) for each in (4.0, 1.0, 2.0))
    parts = {"rollouts": (sampled,), "rewards": (quick, slow), "advantages": (quick,)}
    before = EvaluationView(0, parts, {})
    line = format_sampling_time(read_config(CONFIGS / "tiny_text.yaml"), before)
    assert "5,160 samples take at most about 1:00:12 in all, since 10 took 0:00:07" in line
    chosen = ["rollout.previews.per_prompt=24", "rollout.previews.steps=4"]
    previewed = format_sampling_time(read_config(CONFIGS / "tiny_sd3_nft.yaml", chosen), before)
    assert ["previews" in each for each in (line, previewed)] == [False, True]


def test_held_out_images_that_are_less_work_take_less_time() -> None:
    """2 images took 10 s. 1 x 2 x 3 trained ones and 2 held-out ones are 40 s; with a third of the steps before, 100 s.

    With guidance, two passes a step, for training alone: 70 s. More steps held out: the trained images take no longer.
    """
    sampled = ADVANTAGES.model_copy(update={"rows": 2, "seconds": 10.0})
    before = EvaluationView(0, {"rollouts": (sampled,)}, {})
    sizes = ("run.iterations=1", "rollout.prompts_per_iteration=2", "rollout.group_size=3", "update.minibatch_size=6")
    settings = ("rollout.num_inference_steps=6", "evaluate.num_inference_steps=2")
    guided = ("rollout.guidance_scale=3.0", "evaluate.guidance_scale=1.0")
    for changes, seconds in (((), 40), (settings, 100), (guided, 70), (("evaluate.num_inference_steps=16",), 40)):
        config = read_config(CONFIGS / "tiny_sd3_nft.yaml", [*sizes, "update.timesteps_per_image=1", *changes])
        assert f"8 samples take at most about {duration(seconds)} in all" in format_sampling_time(config, before)


CONFIGS = REPOSITORY / "configs"
SMALL: dict[str, Any] = {
    "rollout.prompts_per_iteration": 2,
    "rollout.prompts_per_batch": 2,
    "rollout.group_size": 2,
    "update.minibatch_size": 4,
    "update.micro_batch_size": 4,
    "evaluate.prompts": None,
}


def start(runs: Runs, name: str, settings: dict[str, Any], file: str = "tiny_text.yaml") -> Start:
    return runs.start_text(
        name, file=CONFIGS / file, **{key.replace(".", "__"): each for key, each in settings.items()}
    )


def test_a_sign_is_logged_once_and_stands_in_reports_the_summary_and_the_page(
    empty: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    constant = SICK_RUNS["constant"].settings["rewards"]
    settings = {**SMALL, "run.iterations": 4, "rewards": constant}
    started = start(empty, "constant", settings)
    (sign,) = started.summary.signs
    assert (sign.name, sign.iteration) == ("groups-without-spread", 3)
    # As it shows, and with the summary.
    logged, end = (message for message in caplog.messages if str(sign) in message)
    assert (logged, end.startswith("constant: 4 iterations\n")) == (str(sign), True)
    assert str(sign) in [line for notice in started.summary.report().notices for line in notice.lines]
    with get_client(sync_client=True) as client:
        filtered = ArtifactFilter(key=ArtifactFilterKey(any_=["grpo-constant-report"]))
        reports = {str(each.description): str(each.data) for each in client.read_artifacts(artifact_filter=filtered)}
    shown = {int(title.rpartition(" ")[2]): "of the groups have no spread" in text for title, text in reports.items()}
    assert shown == {1: False, 2: False, 3: True, 4: True}

    page = tmp_path / "page.html"
    arguments = ["inspect", "constant", "--root", str(empty.root), "--html", str(page)]
    printed = CliRunner().invoke(application, [*arguments, "--json"])
    told = [{"name": sign.name, "iteration": 3, "message": sign.message, "subject": ""}]
    assert json.loads(printed.stdout.splitlines()[-1])["signs"] == told
    assert "of the groups have no spread" in page.read_text()
    # A later start of the finished run has the same.
    assert start(empty, "constant", settings).summary.signs == [sign]


@pytest.mark.slow
def test_a_gate_close_to_its_tolerance(empty: Runs) -> None:
    settings = {**SMALL, "run.iterations": 1}
    assert start(empty, "wide", settings).summary.signs == []
    measured = empty.metrics(1, "wide")
    assert measured[PARITY_SHARE] < 0.1
    # The same rollouts with a tolerance that is a ninth above what was measured.
    largest = measured["sampling/sampling_logp_difference/max"]
    narrow = start(empty, "narrow", {**settings, "update.parity.max_difference": largest / 0.9})
    assert [(sign.name, sign.iteration) for sign in narrow.summary.signs] == [("parity", 1)]
    assert empty.metrics(1, "narrow")[PARITY_SHARE] == pytest.approx(0.9)


@pytest.mark.slow
def test_every_sick_run_shows_its_signs_and_no_others(empty: Runs) -> None:
    found = {
        name: [each.name for each in start(empty, name, settings_of(run)).summary.signs]
        for name, run in SICK_RUNS.items()
    }
    assert found == {name: list(run.signs) for name, run in SICK_RUNS.items()}
    shared = {name: settings_of(run, healthy=True) for name, run in SICK_RUNS.items() if run.shared}
    healthy = {"plain": settings_of(SICK_RUNS["kl"], healthy=True), **shared}
    assert {name: start(empty, f"healthy-{name}", each).summary.signs for name, each in healthy.items()} == {
        name: [] for name in healthy
    }


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(path.name for path in CONFIGS.glob("tiny*.yaml")))
def test_the_shipped_tiny_configurations_show_none(empty: Runs, file: str) -> None:
    planned = read_config(CONFIGS / file).run.iterations
    summary = start(empty, "shipped", {"run.iterations": planned}, file).summary
    assert (summary.iterations, summary.signs) == (planned, [])
