"""Names that are given to commands stay below the root, and what is refused leaves no trace outside."""

from pathlib import Path

import pytest

from flows.replay.request import ReplayRequest, plan_replay
from flows.rescoring.request import RescoreRequest, plan_rescore
from grpo_core.errors import InputError, InputErrors
from tests.flows.conftest import Runs
from tests.flows.rescoring.test_rescore import SSIM, rewards_file

OUTSIDE = ("../up", "a/b", "..", ".", "/tmp/up", "../../up", "a\nb", "")


def everything(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", OUTSIDE)
def test_of_replays_and_rescorings(finished: Runs, name: str) -> None:
    root, file = str(finished.root), rewards_file(finished, SSIM)
    before = everything(finished.root.parent)
    attempts = {
        "a replay": lambda: plan_replay(ReplayRequest("run", root=root, name=name)),
        "advantages": lambda: plan_replay(ReplayRequest("run", root=root, advantages=name)),
        "a rescoring": lambda: plan_rescore(RescoreRequest(("run",), file, name, root=root)),
    }
    if not name:
        # The default then.
        del attempts["a replay"], attempts["advantages"]
    for attempt in attempts.values():
        with pytest.raises((InputError, InputErrors)):
            attempt()
    assert everything(finished.root.parent) == before
