"""The docstring of every package lists what stands in it, and nothing that is gone."""

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
# A line begins with one name or several, before what they are: `files   ...`, `a, b/   ...`, "- ``name``: ...".
LISTED = re.compile(r"^(?:- ``(\w+)``|([a-z][\w, ]*?)/?(?:  +|$))", re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_modules(package: str) -> None:
    folder = REPOSITORY / package
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    written = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert {name for name in modules | packages if not re.search(rf"\b{name}\b", written)} == set()
    listed = {name for found in LISTED.findall(written) for name in re.findall(r"\w+", "".join(found))}
    assert listed - modules - {path.name for path in folder.iterdir()} == set()
