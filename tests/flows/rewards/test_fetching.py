"""`grpo rewards fetch`: asks, downloads each file once, and says which setting names it."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.command_line.main import application
from grpo_core.rewards.similarity import lpips
from grpo_core.rewards.weights.files import PublishedWeights
from tests.grpo_core.rewards.weights.test_fetch import CONTENT, NAME, Makers, address

__all__ = ["address"]


def test_it_asks_first_and_fetches_what_a_file_names(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lpips.TRUNKS, "alex", PublishedWeights(NAME, "the makers", f"{address}/{NAME}", licence="BSD"))  # type: ignore[arg-type]
    settings = {"weights": str(tmp_path / "here" / NAME)}
    rewards = [{"reward": "lpips", "settings": settings}, {"reward": "ssim"}, {"reward": "lpips", "name": "again"}]
    rewards[-1]["settings"] = settings
    file = tmp_path / "rewards.yaml"
    file.write_text(yaml.safe_dump({"rewards": rewards}))
    asked = CliRunner().invoke(application, ["rewards", "fetch", str(file)], input="n\n")
    assert asked.exit_code == 2
    assert "2.0 KiB" in asked.stderr
    assert "BSD" in asked.stderr
    assert not (tmp_path / "here").exists()
    done = CliRunner().invoke(application, ["rewards", "fetch", str(file), "--yes", "--json"])
    assert done.exit_code == 0, done.stderr
    listed = json.loads(done.stdout.splitlines()[-1])["fetched"]
    assert listed == [{"reward": "lpips", "setting": "weights", "path": settings["weights"]}]
    assert Path(settings["weights"]).read_bytes() == CONTENT
    assert Makers.requested.count("GET") == 1
    assert CliRunner().invoke(application, ["rewards", "fetch", "nothing"]).exit_code == 2
