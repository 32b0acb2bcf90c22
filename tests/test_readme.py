"""The commands of README.md, run in order and as printed, in a folder with nothing but the checkout in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import configs

CHECKOUT = Path(configs.__file__).parent.parent
ELSEWHERE = ("git clone", "make train", ".venv/bin/grpo ui")
"""Beginnings of lines that install, repeat this test's own training, or wait for a person."""


def blocks() -> list[str]:
    """Return the indented blocks of the page that are commands or Python, without the lines that do not run here."""
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", text, re.MULTILINE)
    dedented = [re.sub(r"^ {4}", "", block, flags=re.MULTILINE).strip("\n") for block in found]
    kept = ["\n".join(line for line in block.splitlines() if not line.startswith(ELSEWHERE)) for block in dedented]
    return [block for block in kept if re.match(r"\.venv|cat |printf |import |from ", block.lstrip("\n"))]


@pytest.mark.slow
def test_every_block_runs_in_order(tmp_path: Path) -> None:
    for name in ("data", "flows", "tasks", "grpo_core"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (tmp_path / "configs").mkdir()
    for path in (CHECKOUT / "configs").iterdir():
        if path.name != "tiny.yaml":
            (tmp_path / "configs" / path.name).symlink_to(path)
    # Everything as shipped but its length.
    tiny = yaml.safe_load((CHECKOUT / "configs" / "tiny.yaml").read_text(encoding="utf-8"))
    tiny["run"]["iterations"] = 2
    (tmp_path / "configs" / "tiny.yaml").write_text(yaml.safe_dump(tiny), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PREFECT_HOME": str(tmp_path / "prefect")}
    said = blocks()
    assert len(said) > 6, "the page has its blocks"
    for block in [".venv/bin/grpo train configs/tiny.yaml", *said]:
        python = re.match(r"import |from ", block)
        command = [sys.executable, "-c", block] if python else ["bash", "-e", "-c", block]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, f"{block}\n{ended.stdout}\n{ended.stderr}"
