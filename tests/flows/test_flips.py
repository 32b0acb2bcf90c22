"""Bit rot in every kind of file of a finished run: found by name, or without effect. Nothing of it is trusted."""

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.storage.records import FOLDER as RECORDS
from tasks.storage.records import StageRecords
from tasks.storage.reference import ArtifactRef, StaleReferenceError
from tasks.storage.store import MANIFEST_ENDING, ArtifactStore, use_store

from .conftest import Runs, Start

Compare = Callable[[Runs, Start], None]
SETTINGS: dict[str, object] = {
    "run__iterations": 1,
    "evaluate__prompts": "data/prompts/shapes_heldout.jsonl",
    "evaluate__targets": "data/targets",
    "evaluate__target_column": "target",
    "evaluate__limit": 1,
    "evaluate__samples_per_prompt": 2,
}
FLIPS_OF_A_FILE, FLIPS_OF_A_RECORD, ROUNDS = 4, 3, 2
# Written anew by every start.
DESCRIPTIONS = ("run.json", "config.yaml", "iteration_000001/metrics.parquet", "contact_sheet.png")


@dataclass(frozen=True)
class Evaluated:
    """A finished run with evaluations, which no test changes."""

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


@pytest.fixture(scope="module")
def evaluated(server: None, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    runs = Runs(tmp_path_factory.mktemp("evaluated"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).resolve().parents[2])
        start = runs.start(**SETTINGS)
    store = ArtifactStore(str(runs.root), "run")
    manifests = sorted(runs.path().rglob(f"*{MANIFEST_ENDING}"))
    folders = [path.relative_to(runs.path()).as_posix().removesuffix(MANIFEST_ENDING) for path in manifests]
    references = {folder: store.find(folder) for folder in folders}
    assert None not in references.values()
    return Evaluated(runs, start, references)  # type: ignore[arg-type]


def rot(path: Path, chance: random.Random) -> int:
    """Flip one bit as a failing disk does, which leaves the times of the file; the position."""
    before, content = path.stat(), bytearray(path.read_bytes())
    position = chance.randrange(len(content))
    content[position] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return position


def shorten(path: Path, size: int) -> None:
    os.truncate(path, size)


def damages(path: Path, chance: random.Random) -> Iterator[str]:
    """Damage the file in one way after the other, whole before each."""
    whole = path.read_bytes()
    for _ in range(FLIPS_OF_A_FILE):
        yield f"bit of byte {rot(path, chance)}"
        path.write_bytes(whole)
    for size in {0, len(whole) // 2, len(whole) - 1}:
        shorten(path, size)
        yield f"shortened to {size}"
        path.write_bytes(whole)


def test_every_file_of_every_artifact_is_noticed_by_name_and_set_aside(evaluated: Evaluated, tmp_path: Path) -> None:
    chance, flips, kinds = random.Random(20), 0, set()
    for folder, file in evaluated.files():
        reference, source = evaluated.references[folder], evaluated.runs.path()
        alone = ArtifactStore(str(tmp_path), "run")
        place = Path(alone.path(file))

        def bring(store: ArtifactStore = alone, folder: str = folder, source: Path = source) -> None:
            shutil.rmtree(store.path(), ignore_errors=True)
            shutil.copytree(source / folder, store.path(folder))
            shutil.copy(source / f"{folder}{MANIFEST_ENDING}", store.path(f"{folder}{MANIFEST_ENDING}"))

        bring()
        assert ArtifactStore(str(tmp_path), "run").find(folder) == reference
        for damage in damages(place, chance):
            store = ArtifactStore(str(tmp_path), "run")
            assert store.find(folder) is None, (file, damage)
            with pytest.raises(StaleReferenceError, match=re.escape(place.name)):
                store.local_files(reference)
            assert [place.name in reason for reason in store.reasons] == [True], (file, damage)
            assert not Path(store.path(folder)).exists()
            flips += damage.startswith("bit")
            bring()
        kinds.add(re.sub(r"\d{6}", "N", file))
    assert flips >= 100
    for kind in (
        "iteration_N/rollouts/part-00000.parquet",
        "iteration_N/rewards/ssim/scores.parquet",
        "iteration_N/advantages/advantages.parquet",
        "iteration_N/advantages.manifest.json",
        "policies/N/adapter_model.safetensors",
        "policies/N/adapter_config.json",
        "policies/N/optimizer.safetensors",
        "policies/N/training_state.json",
        "policies/N/update_steps.parquet",
        "policies/N.manifest.json",
        "evaluations/N/rollouts/part-00000.parquet",
        "evaluations/N/rewards/psnr/scores.parquet",
        "evaluations/N/advantages/advantages.parquet",
        "evaluations/N/rollouts.manifest.json",
    ):
        assert kind in kinds


@pytest.mark.parametrize("place", ["of the run", "of the root"])
def test_every_record_is_noticed_by_name_or_says_the_same(evaluated: Evaluated, tmp_path: Path, place: str) -> None:
    chance, flips, noticed = random.Random(21), 0, 0
    for source in sorted((evaluated.runs.root / RECORDS).glob("*.json")):
        key, whole = source.stem, source.read_bytes()
        store = ArtifactStore(str(tmp_path), "run")
        use_store(store)
        record = tmp_path / (f"run/{RECORDS}" if place == "of the run" else RECORDS) / source.name
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_bytes(whole)
        said = StageRecords().read_path(key)
        for _ in range(FLIPS_OF_A_RECORD):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_bytes(whole)
            rot(record, chance)
            flips += 1
            try:
                assert StageRecords().read_path(key) == said
            except StaleReferenceError as error:
                assert key in str(error)  # noqa: PT017 - flips of white space need not raise
                noticed += 1
        for size in (0, len(whole) // 2):
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_bytes(whole[:size])
            with pytest.raises(StaleReferenceError, match=key):
                StageRecords().read_path(key)
        record.unlink(missing_ok=True)
    assert flips >= 30
    assert noticed > 0.7 * flips


@pytest.fixture
def copied(evaluated: Evaluated, tmp_path: Path) -> Runs:
    runs = Runs(tmp_path / "runs")
    shutil.copytree(evaluated.runs.root, runs.root)
    assert runs.start(**SETTINGS).stages == ()
    return runs


def require_unchanged(runs: Runs, evaluated: Evaluated, again: Start) -> None:
    assert again.summary.policy_digest == evaluated.start.summary.policy_digest
    assert runs.tables() == evaluated.runs.tables()


def test_what_every_start_writes_anew_is_mended_by_it(copied: Runs, evaluated: Evaluated) -> None:
    chance = random.Random(22)
    whole = {name: copied.path(name).read_bytes() for name in DESCRIPTIONS}
    for _ in range(ROUNDS):
        for name in DESCRIPTIONS:
            rot(copied.path(name), chance)
        again = copied.start(**SETTINGS)
        assert again.stages == ()
        require_unchanged(copied, evaluated, again)
        assert {name: copied.path(name).read_bytes() for name in DESCRIPTIONS} == whole
    for name in DESCRIPTIONS:
        shorten(copied.path(name), len(whole[name]) // 2)
    assert copied.start(**SETTINGS).stages == ()
    assert {name: copied.path(name).read_bytes() for name in DESCRIPTIONS} == whole


@pytest.mark.slow
def test_a_bit_in_every_file_at_once(copied: Runs, evaluated: Evaluated) -> None:
    chance = random.Random(23)
    files = [path for path in copied.root.rglob("*") if path.is_file() and path.stat().st_size > 0]
    for path in files:
        rot(path, chance)
    assert len(files) > 50
    require_unchanged(copied, evaluated, copied.start(**SETTINGS))
    again = copied.start(**SETTINGS)
    assert again.stages == ()
    require_unchanged(copied, evaluated, again)


@pytest.mark.slow
def test_a_bit_in_any_file_and_a_start_time_and_again(copied: Runs, evaluated: Evaluated) -> None:
    chance = random.Random(24)
    for _ in range(24):
        present = sorted(path for path in copied.root.rglob("*") if path.is_file() and path.stat().st_size > 0)
        kept = [path for path in present if "set_aside" not in path.parts]
        # Half of them among what was set aside as well: nothing comes home from there damaged.
        path = chance.choice(chance.choice((kept, present)))
        rot(path, chance)
        require_unchanged(copied, evaluated, copied.start(**SETTINGS))
