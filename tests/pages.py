"""The blocks of README.md and docs/*.md: of which kind they are, and how they run: in order and as printed.

A block whose first line is a comment that begins with `needs` (a GPU, the hub, a server) does not run here.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tasks.process import CHECKOUT

MARK = "# needs "
_BLOCK = re.compile(r"(?:^ {4}.*\n|^\n+(?= {4}))+|^```(\w*)\n(?:.*\n)*?```\n", re.MULTILINE)
_PROGRAMS = (
    *("cat", "docker", "export", "git", "grep", "grpo", "kubectl", "make", "prefect", "printf", "sbatch", "sudo"),
    *("torchrun", "uv", "vllm"),
)
_TIMEOUT = 1800


@dataclass(frozen=True)
class Block:
    """A block of a page, without its indentation or fences.

    Attributes:
        place: page and line.
        kind: shell, python, yaml or text; of a block in fences, what they say.
        end: where the page goes on after it, in characters.
    """

    place: str
    text: str
    kind: str
    end: int

    @property
    def runs_here(self) -> bool:
        """Whether it is a program that needs nothing but a checkout with its packages."""
        return self.kind in ("shell", "python") and not self.text.startswith(MARK)


def pages() -> list[Path]:
    """The README and all pages of docs/, in the order in which they run."""
    docs = sorted((CHECKOUT / "docs").glob("*.md"))
    first = CHECKOUT / "docs" / "tutorial.md"
    return [CHECKOUT / "README.md", *sorted(docs, key=lambda page: page != first)]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        lines = found[0].strip("\n").splitlines()
        inside = lines[1:-1] if lines[0].startswith("```") else [line.removeprefix("    ") for line in lines]
        line = text.count("\n", 0, found.start() + len(found[0]) - len(found[0].lstrip("\n"))) + 1
        body = "\n".join(inside)
        yield Block(f"{page.name}:{line}", body, found[1] or _kind(body), found.end())


def prose(page: Path) -> str:
    """Return the text of a page without its blocks."""
    return _BLOCK.sub("\n", page.read_text(encoding="utf-8"))


def _kind(body: str) -> str:
    words = [line.split()[0] for line in body.splitlines() if line.strip() and not line.startswith("#")]
    if words[:1] in (["import"], ["from"]):
        return "python"
    if any(word.startswith(".venv/") or word in _PROGRAMS for word in words):
        return "shell"
    try:
        return "yaml" if isinstance(yaml.safe_load(body), dict) else "text"
    except yaml.YAMLError:
        return "text"


def prepare(folder: Path, iterations: int | None = None) -> None:
    """Make a folder look like a checkout with its packages installed, and nothing else in it.

    Args:
        iterations: length of the shipped trainings of tiny models there; None leaves them as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("data", "docs", "flows", "grpo_core", "tasks", "Makefile", "pyproject.toml", "requirements.lock"):
        (folder / name).symlink_to(CHECKOUT / name)
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != ".installed":
            (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv" / ".installed").touch()
    shutil.copytree(CHECKOUT / "configs", folder / "configs")
    for path in (folder / "configs").glob("tiny*.yaml") if iterations else ():
        text = path.read_text(encoding="utf-8")
        path.write_text(
            re.sub(r"^(  iterations:) \d+", rf"\1 {iterations}", text, flags=re.MULTILINE), encoding="utf-8"
        )


def run(block: Block, folder: Path) -> str:
    """Run a block as printed in a folder, and return what it printed; one that fails is an AssertionError."""
    settings = {"PYTHONPATH": str(folder), "PREFECT_HOME": str(folder / "prefect"), "COLUMNS": "120"}
    command = [".venv/bin/python", "-c"] if block.kind == "python" else ["bash", "-euo", "pipefail", "-c"]
    ended = subprocess.run(
        [*command, block.text],
        cwd=folder,
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT,
    )
    assert ended.returncode == 0, f"{block.place}\n{block.text}\n{ended.stdout}"
    return ended.stdout
