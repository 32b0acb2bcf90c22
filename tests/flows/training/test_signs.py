"""Signs of runs that do not learn: where they are shown, on runs made sick on purpose, and not on healthy ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from typer.testing import CliRunner

from configs.loader import read_config
from flows.command_line.main import application
from tests.bench.sick_runs import SICK_RUNS, settings_of
from tests.flows.conftest import REPOSITORY, Runs, Start

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
