"""The examples of docs/python.md run as they stand, one after another as a reader runs them."""

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.flows.conftest import REPOSITORY

BLOCK = re.compile(r"(?:^    .*\n|^\n(?=    ))+", re.MULTILINE)


@pytest.mark.slow
def test_every_example_runs(server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("configs", "data"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    page = (REPOSITORY / "docs" / "python.md").read_text()
    for found in BLOCK.finditer(page):
        line = page.count("\n", 0, found.start())
        exec(compile("\n" * line + dedent(found[0]), "docs/python.md", "exec"), names)
    assert names["summary"].stopped_early
    assert names["summary"].iterations == len(names["seen"]) == 2
    assert names["heldout"].height == 16
    assert names["other"].iterations == 3
    assert names["loss"].requires_grad
