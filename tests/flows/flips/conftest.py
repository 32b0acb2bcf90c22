"""A finished run to be damaged, and the table of all flips."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import MANIFEST_ENDING, ArtifactStore
from tests.flows.conftest import REPOSITORY, Runs, Start
from tests.flows.flips.ledger import Flip, table_of
from tests.flows.rescoring.test_rescore import JPEG, scored_again

TABLE = "FLIPS_TABLE"
"""Variable with the file that the table goes to; without it the table is only printed."""
FLIPS = pytest.StashKey[list[Flip]]()
SETTINGS: dict[str, object] = {
    "run__iterations": 1,
    "evaluate__prompts": "data/prompts/shapes_heldout.jsonl",
    "evaluate__targets": "data/targets",
    "evaluate__target_column": "target",
    "evaluate__limit": 1,
    "evaluate__samples_per_prompt": 2,
}


@dataclass(frozen=True)
class Evaluated:
    """A finished run with evaluations and a rescoring, which no test changes."""

    runs: Runs
    start: Start
    references: dict[str, ArtifactRef]

    def files(self) -> list[tuple[str, str]]:
        """Every artifact's folder with each of its files, and with its manifest."""
        top, found = self.runs.path(), []
        for folder in self.references:
            paths = [path for path in sorted((top / folder).rglob("*")) if path.is_file()]
            found += [(folder, path.relative_to(top).as_posix()) for path in paths]
            found.append((folder, f"{folder}{MANIFEST_ENDING}"))
        return found

    def require_same_end(self, runs: Runs, again: Start) -> None:
        """That a start came to the same policy and the same values in every table that it is to make."""
        assert again.summary.policy_digest == self.start.summary.policy_digest
        assert _of_training(runs) == _of_training(self.runs)

    def bring(self, folder: str, store: ArtifactStore) -> None:
        """Make a copy of one artifact all that the store's run holds."""
        shutil.rmtree(store.path(), ignore_errors=True)
        shutil.copytree(self.runs.path(folder), store.path(folder))
        shutil.copy(self.runs.path(f"{folder}{MANIFEST_ENDING}"), store.path(f"{folder}{MANIFEST_ENDING}"))


def _of_training(runs: Runs) -> dict[str, Any]:
    """A start neither makes nor needs what was scored again; where run.json is damaged, that is set aside."""
    return {name: table for name, table in runs.tables().items() if not name.startswith("rescored/")}


@pytest.fixture(scope="package")
def evaluated(server: None, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    runs = Runs(tmp_path_factory.mktemp("evaluated") / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        start = runs.start(**SETTINGS)
        scored_again(runs, JPEG)
    store = ArtifactStore(str(runs.root), "run")
    manifests = sorted(runs.path().rglob(f"*{MANIFEST_ENDING}"))
    folders = [path.relative_to(runs.path()).as_posix().removesuffix(MANIFEST_ENDING) for path in manifests]
    references = {folder: found for folder in folders if (found := store.find(folder))}
    assert list(references) == folders
    return Evaluated(runs, start, references)


@pytest.fixture
def copied(evaluated: Evaluated, tmp_path: Path) -> Runs:
    runs = Runs(tmp_path / "runs")
    shutil.copytree(evaluated.runs.root, runs.root)
    assert runs.start(**SETTINGS).stages == ()
    return runs


@pytest.fixture
def noted(request: pytest.FixtureRequest) -> Callable[[Sequence[Flip]], None]:
    """Takes flips for the table."""
    return request.config.stash.setdefault(FLIPS, []).extend


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show and write the table of all flips."""
    flips = config.stash.get(FLIPS, [])
    if not flips:
        return
    told = table_of(flips)
    terminalreporter.write_line(f"\n{told}")
    if os.environ.get(TABLE):
        Path(os.environ[TABLE]).write_text(told)
