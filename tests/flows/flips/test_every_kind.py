"""One flipped bit, or a cut, in every kind of file of a run: found by name, or without effect."""

import io
import random
import re
import shutil
from pathlib import Path

import polars as pl
import pytest

from tasks.execution.call import StageCall, call_file, code_of, read_call, write_call
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore, described, use_store
from tasks.storage.prefect_results import FOLDER, StageRecords
from tests.flows.conftest import Runs, flip
from tests.flows.flips.conftest import SETTINGS, Evaluated

FLIPS = 6
METRICS = "iteration_000001/metrics.parquet"
DESCRIPTIONS = ("run.json", "config.yaml", METRICS, "contact_sheet.png")
SUFFIXES = {".parquet", ".safetensors", ".json", ".html", ".yaml"}
ROOTS = ("tasks.update.update_policy:update_policy_task",)


@pytest.fixture
def chance() -> random.Random:
    return random.Random(20)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "root"), "run")


def names_damage(file: Path) -> str:
    """Pattern of a message that names a damaged file and its sha256 or reason."""
    return rf"\b{re.escape(file.name)} (has sha256 \w{{12}}, not \w{{12}}|is damaged \(.+\))"


def sizes(file: Path) -> list[int]:
    """Sizes to cut a file to."""
    size = file.stat().st_size
    return sorted({0, size // 2, size - 1})


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def test_every_file_of_every_artifact(evaluated: Evaluated, store: ArtifactStore, chance: random.Random) -> None:
    assert {Path(file).suffix for _, file in evaluated.files()} <= SUFFIXES
    assert len(evaluated.files()) > 20
    for artifact, name in evaluated.files():
        reference, file = evaluated.references[artifact], Path(store.path(name))
        evaluated.copy_alone(artifact, store)
        for damage in (None, None, None, None, *sizes(file)):
            store = ArtifactStore(store.root, "run")
            evaluated.copy_alone(artifact, store)
            assert store.find(artifact) == reference
            if damage is None:
                flip(file, chance)
            else:
                cut(file, damage)
            assert store.find(artifact) is None, (name, damage)
            with pytest.raises(StaleReferenceError, match=names_damage(file)):
                store.local_files(reference)
            (reason,) = store.reasons
            assert re.search(names_damage(file), reason)
            assert not Path(store.path(artifact)).exists()


@pytest.mark.parametrize("place", [f"run/{FOLDER}", FOLDER], ids=["of the run", "of the root"])
def test_stage_records(evaluated: Evaluated, tmp_path: Path, chance: random.Random, place: str) -> None:
    same = 0
    sources = sorted((evaluated.runs.root / FOLDER).glob("*.json"))
    assert sources
    for source in sources:
        key, record = source.stem, tmp_path / place / source.name
        for damage in (None, None, None, *sizes(source)):
            for folder in (tmp_path / "run", tmp_path / FOLDER):
                shutil.rmtree(folder, ignore_errors=True)
            record.parent.mkdir(parents=True)
            shutil.copy(source, record)
            store = ArtifactStore(str(tmp_path), "run")
            use_store(store)
            original = StageRecords().read_path(key)
            # Reading a record of the root copies it to the run.
            shutil.rmtree(tmp_path / "run" / FOLDER, ignore_errors=True)
            record.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, record)
            if damage is None:
                flip(record, chance)
            else:
                cut(record, damage)
            try:
                # The last digit of a number may be beyond the precision of a float.
                assert StageRecords().read_path(key) == original
                same += 1
            except StaleReferenceError as error:
                assert key in [*store.reasons, str(error)][0]  # noqa: PT017
                assert (store.reasons != []) == place.startswith("run")
    assert same <= 0.05 * 3 * len(sources)


def test_calls_of_pools(store: ArtifactStore, chance: random.Random) -> None:
    """As if there were none, so that the stage is requested once more."""
    request = StageCall(
        stage="update policy",
        storage=described(store),
        run="run",
        roots=ROOTS,
        code=code_of(ROOTS),
        arguments={"seed": 3},
    )
    for _ in range(FLIPS):
        write_call(store, request)
        assert read_call(store, request.digest) == request
        flip(Path(store.path(call_file(request.digest))), chance)
        with pytest.raises(ValueError):  # noqa: PT011 - of many kinds
            read_call(store, request.digest)


def test_descriptions_are_written_again(evaluated: Evaluated, copied: Runs, chance: random.Random) -> None:
    original = {name: copied.path(name).read_bytes() for name in DESCRIPTIONS}
    kinds = ("flip", "cut", "missing")
    for turn in range(2):
        for index, (name, content) in enumerate(original.items()):
            damage = kinds[(index + turn) % len(kinds)]
            if damage == "flip":
                flip(copied.path(name), chance)
            elif damage == "cut":
                cut(copied.path(name), len(content) // 2)
            else:
                copied.path(name).unlink()
        again = copied.start(**SETTINGS)
        assert again.stages == ()
        evaluated.require_same_end(copied, again)
        assert copied.path("run.json").read_bytes() == original["run.json"]
        assert copied.path("config.yaml").read_bytes() == original["config.yaml"]
        assert copied.path("contact_sheet.png").read_bytes() == original["contact_sheet.png"]
        # How long an iteration took on the clock is in no other file.
        before, after = (
            pl.read_parquet(content).filter(pl.col("metric") != "wall_time")
            for content in (io.BytesIO(original[METRICS]), copied.path(METRICS))
        )
        assert after.equals(before)
