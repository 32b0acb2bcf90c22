"""A finished run is read from its files alone, unless one of them is damaged or the start differs."""

import json
import random
import shutil
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from configs.loader import read_config
from configs.schema import RunConfig
from flows import train
from flows.command_line.flow_commands import stored_summary
from tasks.storage.parquet import DIGESTS, part_digests
from tests.flows.conftest import TINY, Runs, flip
from tests.flows.flips.conftest import SETTINGS, Evaluated

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


def test_another_configuration_is_left_to_a_start(finished: Runs) -> None:
    for change in CHANGES:
        assert stored_summary(config_of(finished, **change)) is None, change


pytestmark = pytest.mark.slow


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


def test_a_bit_in_every_file_at_once(copied: Runs, evaluated: Evaluated) -> None:
    chance, files = random.Random(23), files_of(copied)
    for path in files:
        flip(path, chance)
    assert len(files) > 50
    evaluated.require_same_end(copied, copied.start(**SETTINGS))
    again = copied.start(**SETTINGS)
    assert again.stages == ()
    evaluated.require_same_end(copied, again)


def test_a_bit_in_any_file_and_a_start_time_and_again(copied: Runs, evaluated: Evaluated) -> None:
    chance = random.Random(24)
    for _ in range(24):
        present = files_of(copied)
        kept = [path for path in present if not is_moved_away(path)]
        # Half of them among the moved files as well: nothing is restored damaged.
        flip(chance.choice(chance.choice((kept, present))), chance)
        evaluated.require_same_end(copied, copied.start(**SETTINGS))
