"""Names that are given to commands stay below the root, and what is refused leaves no trace outside."""

from pathlib import Path

import pytest

from configs.loader import validated
from flows.pipeline.requests import RescoreRequest
from tests.flows.conftest import Runs, refused
from tests.flows.replay.replays import request_replay
from tests.flows.rescoring.test_rescore import SSIM, rewards_file

OUTSIDE = ("../up", "a/b", "..", ".", "/tmp/up", "../../up", "a\nb", "")


def everything(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", OUTSIDE)
def test_of_replays_and_rescorings(finished: Runs, name: str) -> None:
    file = str(rewards_file(finished, SSIM))
    values = {"sources": ["run"], "rewards": file, "name": name, "root": str(finished.root)}
    before = everything(finished.root.parent)
    refused(lambda: request_replay(finished, name=name).plan)
    refused(lambda: validated(RescoreRequest, values).plan)
    if name:
        refused(lambda: request_replay(finished, advantages=name).plan)
    assert everything(finished.root.parent) == before
