"""A finished run is read from its files alone, unless one of them is damaged or the start differs."""

import json
import random
import shutil

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from configs.loader import read_config
from configs.schema import RunConfig
from flows.functions import read_finished, train
from tasks.storage.tables.parquet import DIGESTS, part_digests
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
    places = {"folder", "contact_sheet"}
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
        assert read_finished(config) is None, path
        path.write_bytes(content)
    metrics = finished.path("iteration_000001", "metrics.parquet")
    content = metrics.read_bytes()
    table, stated = pq.read_table(metrics), pq.read_metadata(metrics).metadata
    doubled = table.set_column(2, table.field(2), pc.multiply(table["value"], 2))
    pq.write_table(doubled.replace_schema_metadata({DIGESTS: stated[DIGESTS.encode()]}), metrics)
    assert part_digests(metrics) == json.loads(stated[DIGESTS.encode()])
    assert read_finished(config) is None
    metrics.write_bytes(content)
    manifest = next(finished.path("iteration_000001", "rewards").glob("*.json"))
    content = manifest.read_bytes()
    manifest.unlink()
    assert read_finished(config) is None
    manifest.write_bytes(content)
    assert read_finished(config) is not None


def test_another_configuration_is_left_to_a_start(finished: Runs) -> None:
    for change in CHANGES:
        assert read_finished(config_of(finished, **change)) is None, change
