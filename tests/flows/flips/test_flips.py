"""One flipped bit, or a cut, in every kind of file of a run: found by name or without effect, at the next start too."""

import io
import json
import random
import re
import shutil
from pathlib import Path

import polars as pl
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from configs.loader import read_config
from configs.schema import RunConfig
from flows import train
from flows.command_line.flow_commands import stored_summary
from tasks.execution.call import StageCall, call_file, code_of, read_call, write_call
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore, described, use_store
from tasks.storage.parquet import DIGESTS, part_digests
from tasks.storage.prefect_results import FOLDER, StageRecords
from tests.flows.conftest import TINY, Runs, flip
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


KINDS = (
    "iteration_000001/rewards/*/*.parquet",
    "policies/000001/*/*.safetensors",
    "evaluations/000000/rollouts/*.parquet",
    "evaluations/target/advantages/*.parquet",
    ".stages/update-policy-*.json",
    "run.json",
    "config.yaml",
)
CHANGES: tuple[dict[str, object], ...] = (
    {"run__iterations": 2},
    {"update__tokens__learning_rate": 0.5},
    {"evaluate__samples_per_prompt": 3},
    {"run__keep_policies": {"last": 1}},
    {"run__trackers": ["tensorboard"]},
)


@pytest.fixture(scope="module")
def finished(evaluated: Evaluated, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A copy in which each test restores what it damages."""
    root = tmp_path_factory.mktemp("finished") / "runs"
    shutil.copytree(evaluated.runs.root, root)
    return Runs(root)


def config_of(runs: Runs, **changes: object) -> RunConfig:
    return read_config(TINY, runs.overrides(run__name="run", **{**SETTINGS, **changes}))


@pytest.mark.slow
def test_it_ends_as_the_start_that_finished_it(evaluated: Evaluated, finished: Runs) -> None:
    starts = finished.path("starts.jsonl").read_bytes()
    finished.path("contact_sheet.png").unlink()
    again = train(config_of(finished), progress=False)
    # A finished run is read from its files: no server is asked for pages.
    places = {"folder", "contact_sheet", "pages"}
    expected, found = (each.model_dump(exclude=places) for each in (evaluated.start.summary, again))
    del expected["seconds"]["total"], found["seconds"]["total"]
    assert found == expected
    assert finished.path("contact_sheet.png").read_bytes() == evaluated.runs.path("contact_sheet.png").read_bytes()
    assert finished.path("starts.jsonl").read_bytes() == starts


@pytest.mark.slow
def test_any_damage_is_left_to_a_start(finished: Runs) -> None:
    chance, config = random.Random(29), config_of(finished)
    for pattern in KINDS:
        path = sorted(finished.path().glob(pattern))[0]
        content = path.read_bytes()
        flip(path, chance)
        assert stored_summary(config) is None, path
        path.write_bytes(content)
    metrics = finished.path("iteration_000001", "metrics.parquet")
    content = metrics.read_bytes()
    table, stated = pq.read_table(metrics), pq.read_metadata(metrics).metadata
    doubled = table.set_column(2, table.field(2), pc.multiply(table["value"], 2))
    pq.write_table(doubled.replace_schema_metadata({DIGESTS: stated[DIGESTS.encode()]}), metrics)
    assert part_digests(metrics) == json.loads(stated[DIGESTS.encode()])
    assert stored_summary(config) is None
    metrics.write_bytes(content)
    manifest = next(finished.path("iteration_000001", "rewards").glob("*.json"))
    content = manifest.read_bytes()
    manifest.unlink()
    assert stored_summary(config) is None
    manifest.write_bytes(content)
    assert stored_summary(config) is not None


@pytest.mark.slow
def test_another_configuration_is_left_to_a_start(finished: Runs) -> None:
    for change in CHANGES:
        assert stored_summary(config_of(finished, **change)) is None, change


def files_of(runs: Runs) -> list[Path]:
    return sorted(path for path in runs.root.rglob("*") if path.is_file() and path.stat().st_size > 0)


def is_moved_away(path: Path) -> bool:
    """Whether it is in quarantine, or in an earlier run."""
    return any(part == "quarantine" or "~" in part for part in path.parts)


def one_per_artifact(evaluated: Evaluated, runs: Runs, chance: random.Random) -> list[Path]:
    """One file of each artifact of the training; a manifest that is damaged as well would be named instead."""
    files = chance.sample(evaluated.files(), len(evaluated.files()))
    chosen = {artifact: runs.path(file) for artifact, file in files if not artifact.startswith("rescored/")}
    return sorted(chosen.values())


@pytest.mark.slow
def test_two_hundred_bits_by_rounds(copied: Runs, evaluated: Evaluated) -> None:
    chance, flips = random.Random(23), 0
    artifacts = {copied.path(file) for _, file in evaluated.files()}
    for number in range(9):
        if named := number < 5:
            chosen = one_per_artifact(evaluated, copied, chance)
        else:
            # A file of an artifact whose record is damaged as well is not read, so it is not named.
            chosen = [path for path in files_of(copied) if path not in artifacts and not is_moved_away(path)]
        for path in chosen:
            flip(path, chance)
        before = len(copied.reasons())
        evaluated.require_same_end(copied, copied.start(**SETTINGS))
        reasons = copied.reasons()[before:]
        for path in chosen if named else ():
            assert any(path.name in reason for reason in reasons), path
        flips += len(chosen)
    assert flips >= 200
    assert copied.start(**SETTINGS).stages == ()


@pytest.mark.slow
def test_a_bit_in_every_file_at_once(copied: Runs, evaluated: Evaluated) -> None:
    chance, files = random.Random(23), files_of(copied)
    for path in files:
        flip(path, chance)
    assert len(files) > 50
    evaluated.require_same_end(copied, copied.start(**SETTINGS))
    again = copied.start(**SETTINGS)
    assert again.stages == ()
    evaluated.require_same_end(copied, again)


@pytest.mark.slow
def test_a_bit_in_any_file_and_a_start_time_and_again(copied: Runs, evaluated: Evaluated) -> None:
    chance = random.Random(24)
    for _ in range(24):
        present = files_of(copied)
        kept = [path for path in present if not is_moved_away(path)]
        # Half of them among the moved files as well: nothing is restored damaged.
        flip(chance.choice(chance.choice((kept, present))), chance)
        evaluated.require_same_end(copied, copied.start(**SETTINGS))
