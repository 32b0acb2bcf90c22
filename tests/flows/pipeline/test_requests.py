"""Requests as options of commands, and the names in them: what is refused is named, and leaves no trace."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.validation import validated
from flows.command_line.main import application
from flows.pipeline.requests import RescoreRequest
from flows.replaying import plan_replay
from flows.rescoring.plan import plan_rescore
from tests.flows.conftest import Runs, refused
from tests.flows.replaying.replays import request_replay
from tests.flows.rescoring.test_rescore import SSIM, rewards_file

OUTSIDE = ("../up", "a/b", "..", ".", "/tmp/up", "../../up", "a\nb", "")


def everything(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def test_names_of_replays_and_rescorings_stay_below_the_root(finished: Runs) -> None:
    values = {"sources": ["run"], "rewards": str(rewards_file(finished, SSIM)), "root": str(finished.root)}
    before = everything(finished.root.parent)

    def plans(name: str) -> Iterator[Callable[[], object]]:
        yield lambda: plan_replay(request_replay(finished, name=name))
        yield lambda: plan_rescore(validated(RescoreRequest, {**values, "name": name}))
        if name:
            yield lambda: plan_replay(request_replay(finished, advantages=name))

    for name in OUTSIDE:
        for plan in plans(name):
            refused(plan)
    assert everything(finished.root.parent) == before


@pytest.mark.parametrize(
    ("arguments", "place", "value"),
    [
        (["evaluate", "run", "--policy", "-1"], "--policy", -1),
        (["evaluate", "run", "--prompts", ""], "--prompts", ""),
        (["replay", "run", "--max-staleness", "-1"], "--max-staleness", -1),
        (["replay", "run", "--run", "../up"], "--run", "../up"),
        (["rescore", "run", "--rewards", "x.yaml", "--name", "../up"], "--name", "../up"),
        (["prune", "absent", "--policies-last", "0"], "--policies-last", 0),
        (["prune", "absent", "--policies-last", "1"], "RUN", "absent"),
    ],
)
def test_commands_name_the_option_and_end_with_2(
    tmp_path: Path, arguments: list[str], place: str, value: object
) -> None:
    ended = CliRunner().invoke(application, [*arguments, "--root", str(tmp_path), "--json"])
    assert ended.exit_code == 2
    (error,) = json.loads(ended.stdout)["errors"]
    assert (error["place"], error["value"]) == (place, value)
    assert error["hint"]
    assert ended.stderr.startswith(f"error: {place}: got {value!r}.")
