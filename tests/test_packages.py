"""The docstring of every package lists what stands in it, and nothing else."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = sorted(
    path.parent.relative_to(REPOSITORY).as_posix()
    for layer in ("grpo_core", "tasks", "flows", "configs")
    for path in (REPOSITORY / layer).rglob("__init__.py")
)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_modules(package: str) -> None:
    folder = REPOSITORY / package
    there = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = re.findall(r"^ *([a-z][\w, ]*?)/?(?:  +|$)", said, re.MULTILINE)
    names = {name for line in listed for name in re.findall(r"\w+", line)}
    assert {name for name in there - {"__init__"} if not re.search(rf"\b{name}\b", said)} == set()
    assert names - there == set()
