"""A run of a later schema is refused by name, and not a byte of it changes."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.runs.lookup import find_run
from tasks.storage.filesystem.checked_json import dump_checked, load_checked
from tests.flows.conftest import Runs


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and ".incoming" not in path.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def newer(finished: Runs) -> Runs:
    place = finished.path("run.json")
    described = load_checked(place.read_bytes())
    place.write_bytes(dump_checked({**described, "schema_version": described["schema_version"] + 1}))
    return finished


@pytest.mark.parametrize(
    "use",
    [
        lambda runs: runs.start(),
        # Even where everything it made would be set aside as another configuration's.
        lambda runs: runs.start(run__seed=7),
        lambda runs: find_run("run", str(runs.root)),
    ],
    ids=["train", "train another", "inspect, rescore, replay, evaluate, prune"],
)
def test_refused(newer: Runs, use: Callable[[Runs], object]) -> None:
    before = contents(newer.path())
    with pytest.raises(InputError, match=r"run/run.json: got 'schema version 4'. This program reads version 3"):
        use(newer)
    assert contents(newer.path()) == before
