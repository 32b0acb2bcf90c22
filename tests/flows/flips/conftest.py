"""A finished run of both parts of an image model with an evaluation and a rescoring, to be damaged."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tasks.storage.artifacts.reference import MANIFEST_ENDING, ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tests.flows.conftest import Runs, Start
from tests.flows.rescoring.test_rescore import JPEG, scored_again

SETTINGS: dict[str, object] = {
    "run__iterations": 1,
    "policy__train": ["tokens", "denoising"],
    "rollout__images_per_sample": 2,
    "rollout__num_inference_steps": 3,
    "rollout__sde_window_size": 1,
    "rollout__sde_window_range": [0, 2],
    "update": {"tokens": {"minibatch_size": 2}, "denoising": {"minibatch_size": 2}},
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
        """Assert the same policy and the same values in every table that a start makes."""
        assert again.summary.policy_digest == self.start.summary.policy_digest
        assert _training_tables(runs) == _training_tables(self.runs)

    def copy_alone(self, folder: str, store: ArtifactStore) -> None:
        """Replace the content of the store's run with a copy of one artifact."""
        shutil.rmtree(store.path(), ignore_errors=True)
        shutil.copytree(self.runs.path(folder), store.path(folder))
        shutil.copy(self.runs.path(f"{folder}{MANIFEST_ENDING}"), store.path(f"{folder}{MANIFEST_ENDING}"))


def _training_tables(runs: Runs) -> dict[str, Any]:
    """A start neither makes nor needs rescored tables; where run.json is damaged, they are moved away."""
    return runs.tables(but="rescored")


@pytest.fixture(scope="package")
def evaluated(server: None, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    runs = Runs(tmp_path_factory.mktemp("evaluated") / "runs")
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
