"""Bit rot in every kind of file of a run: found by name, or without effect. Nothing of it is trusted."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tasks.storage.prefect_results import FOLDER, StageRecords
from tests.flows.conftest import Runs
from tests.flows.flips import looks
from tests.flows.flips.conftest import SETTINGS, Evaluated
from tests.flows.flips.damage import cuts
from tests.flows.flips.ledger import Flip, Outcome

AT_LEAST = 200
KINDS = {
    "rollouts (Parquet)",
    "scores (Parquet)",
    "advantages (Parquet)",
    "metrics (Parquet)",
    "update steps (Parquet)",
    "weights of the adapter (safetensors)",
    "adapter_config.json",
    "optimizer state (safetensors)",
    "training_state.json (schedule, randomness)",
    "manifest",
    "manifest of what was pruned",
    "stage record of the run",
    "stage record of the root",
    "run.json",
    "config.yaml",
    "contact_sheet.png",
    "call of a pool",
    "outcome of a call",
    "lock",
    "copy in the read cache",
}


def test_two_hundred_bits_and_none_is_trusted(
    evaluated: Evaluated, copied: Runs, tmp_path: Path, noted: Callable[[Sequence[Flip]], None]
) -> None:
    chance = random.Random(20)
    flips = [
        *looks.in_artifacts(evaluated, tmp_path / "artifacts", chance),
        *looks.in_pruned_manifests(evaluated, tmp_path / "pruned", chance),
        *looks.in_records(evaluated, tmp_path / "records", chance),
        *looks.in_calls(tmp_path / "calls", chance),
        *looks.in_locks(tmp_path / "locks", chance),
        *looks.in_cached_copies(evaluated, tmp_path, chance),
        *looks.in_descriptions(evaluated, copied, chance),
    ]
    noted(flips)
    assert len(flips) >= AT_LEAST
    assert {flip.kind for flip in flips} == KINDS
    meaningless = [flip for flip in flips if flip.outcome is Outcome.SAME]
    assert len(meaningless) < 0.05 * len(flips)


def test_artifacts_that_are_cut_short_are_named_and_quarantined(evaluated: Evaluated, tmp_path: Path) -> None:
    for artifact, file in evaluated.files():
        evaluated.bring(artifact, ArtifactStore(str(tmp_path), "run"))
        place = tmp_path / "run" / file
        for size in cuts(place):
            store = ArtifactStore(str(tmp_path), "run")
            assert store.find(artifact) is None, (file, size)
            with pytest.raises(StaleReferenceError, match=looks.told_of(place.name)):
                store.local_files(evaluated.references[artifact])
            assert not Path(store.path(artifact)).exists()
            evaluated.bring(artifact, store)


@pytest.mark.parametrize("place", [f"run/{FOLDER}", FOLDER], ids=["of the run", "of the root"])
def test_records_that_are_cut_short_are_named(evaluated: Evaluated, tmp_path: Path, place: str) -> None:
    use_store(ArtifactStore(str(tmp_path), "run"))
    for source in sorted((evaluated.runs.root / FOLDER).glob("*.json")):
        whole, record = source.read_bytes(), tmp_path / place / source.name
        for size in (0, len(whole) // 2, len(whole) - 1):
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_bytes(whole[:size])
            with pytest.raises(StaleReferenceError, match=source.stem):
                StageRecords().read_path(source.stem)
        record.unlink(missing_ok=True)


def test_descriptions_that_are_cut_short_are_written_anew(copied: Runs) -> None:
    whole = {name: copied.path(name).read_bytes() for name in looks.DESCRIPTIONS}
    for name, content in whole.items():
        copied.path(name).write_bytes(content[: len(content) // 2])
    assert copied.start(**SETTINGS).stages == ()
    assert {name: copied.path(name).read_bytes() for name in looks.DESCRIPTIONS} == whole
