"""A start with another image than the run was trained with names its file and its prompt."""

import json
from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pytest
from PIL import Image

from configs.loader import read_config
from configs.schema import RunConfig
from flows.pipeline.run import changed_run, start_run
from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.schemas import SCHEMA_VERSION
from tests.flows.conftest import REPOSITORY

TINY_EDIT = REPOSITORY / "configs" / "tiny_edit.yaml"
PROMPTS = ("make it red", "make it blue", "make it red", "a circle")
"""Two of one text; the last has no image."""


def change(path: Path) -> None:
    """Change one pixel."""
    with Image.open(path) as image:
        changed = image.copy()
    changed.putpixel((3, 3), (1, 2, 3))
    changed.save(path)


def write(folder: Path) -> None:
    for index in range(len(PROMPTS)):
        for kind in ("before", "after"):
            Image.new("RGB", (64, 64), (20 * index, 90, 30 if kind == "after" else 200)).save(
                folder / f"{kind}{index}.png"
            )
    rows = [
        {"prompt": prompt, "image": f"before{index}.png" if index < 3 else None, "target": f"after{index}.png"}
        for index, prompt in enumerate(PROMPTS)
    ]
    (folder / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(folder: Path) -> RunConfig:
    changes = {
        "run.name": "run",
        "storage.root": str(folder / "runs"),
        "data.prompts": str(folder / "edits.jsonl"),
        "data.targets": str(folder),
        "evaluate": {"every": 0},
    }
    return read_config(TINY_EDIT, [f"{key}={json.dumps(value)}" for key, value in changes.items()])


def train(folder: Path, sampled: int) -> None:
    """Make a run whose one iteration has sampled so many of the prompts, in their order."""
    with start_run(config(folder)) as run, run.store.staging() as staged:
        groups = sorted(run.plan(1, 1, len(PROMPTS)).groups, key=lambda group: str(group.target_uri))[:sampled]
        names = ("dataset", "prompt_id", "prompt", "sources", "target_sha256")
        rows = pl.DataFrame({name: [getattr(group, name) for group in groups] for name in names})
        pl.concat([rows, rows]).write_parquet(staged / "part-00000.parquet")
        commit_artifact(
            run.store,
            staged,
            "iteration_000001/rollouts",
            digest="0" * 64,
            schema_version=SCHEMA_VERSION,
            rows=2 * sampled,
            seconds=1.0,
            metrics={},
        )
    (folder / "runs" / "run" / "policies").mkdir()
    (folder / "runs" / "run" / "policies" / "000001.manifest.json").write_text("")


CASES: Mapping[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "a target": (4, ("after1",), ("the target FOLDER/after1.png of the prompt 'make it blue' changed",)),
    "a source": (4, ("before1",), ("the image FOLDER/before1.png of the prompt 'make it blue' changed",)),
    "several": (
        4,
        ("after3", "before0", "before2"),
        (
            "the target FOLDER/after3.png of the prompt 'a circle' changed",
            "the image FOLDER/before0.png of the prompt 'make it red' changed",
            "the image FOLDER/before2.png of the prompt 'make it red' changed",
        ),
    ),
    "one that was not sampled": (2, ("after3",), ()),
    "one of two, of which one was not sampled": (2, ("before0",), ()),
}


@pytest.mark.parametrize("case", CASES)
def test_what_changed(tmp_path: Path, case: str) -> None:
    sampled, changed, named = CASES[case]
    write(tmp_path)
    train(tmp_path, sampled)
    assert changed_run(config(tmp_path)) is None
    for name in changed:
        change(tmp_path / f"{name}.png")
    found = changed_run(config(tmp_path))
    assert found is not None
    kinds = {"after": "the target images", "before": "the images in prompts"}
    assert any(kinds[name.rstrip("0123456789")] in found.difference for name in changed)
    assert tuple(found.difference.split("; ")[1:]) == tuple(each.replace("FOLDER", str(tmp_path)) for each in named)


def test_without_its_rollouts_the_kind_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    train(tmp_path, 4)
    change(tmp_path / "after1.png")
    part = tmp_path / "runs/run/iteration_000001/rollouts/part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    found = changed_run(config(tmp_path))
    assert found is not None
    assert found.difference.endswith("(data) changed: the target images")
    assert not (tmp_path / "runs" / "run" / "quarantine").exists()


def test_many_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.pipeline.changes._SHOWN", 2)
    write(tmp_path)
    train(tmp_path, 4)
    for index in range(4):
        change(tmp_path / f"after{index}.png")
    found = changed_run(config(tmp_path))
    assert found is not None
    assert found.difference.count(".png of the prompt") == 2
    assert found.difference.endswith("; 2 more images changed")
