"""`grpo rewards fetch`: asks, downloads each file once, and says which setting names it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.command_line.main import application
from grpo_core.rewards import lpips
from tests.grpo_core.rewards.stub import CONTENT, OF_A_MAKER, as_a_maker, serve


def test_it_asks_first_and_fetches_what_a_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"weights": str(tmp_path / "here" / OF_A_MAKER.file)}
    rewards = [
        {"reward": "lpips", "settings": settings},
        {"reward": "ssim"},
        {"reward": "lpips", "name": "again", "settings": settings},
    ]
    file = tmp_path / "rewards.yaml"
    file.write_text(yaml.safe_dump({"rewards": rewards}))
    with serve() as makers:
        makers.respond = as_a_maker
        published = replace(OF_A_MAKER, url=f"{makers.url}/{OF_A_MAKER.file}")
        monkeypatch.setitem(lpips.TRUNKS, "alex", published)
        asked = CliRunner().invoke(application, ["rewards", "fetch", str(file)], input="n\n")
        assert asked.exit_code == 2
        assert f"{len(CONTENT)} B" in asked.stderr
        assert "BSD" in asked.stderr
        assert not (tmp_path / "here").exists()
        done = CliRunner().invoke(application, ["rewards", "fetch", str(file), "--yes", "--json"])
    assert done.exit_code == 0, done.stderr
    listed = json.loads(done.stdout.splitlines()[-1])["fetched"]
    assert listed == [{"reward": "lpips", "setting": "weights", "path": settings["weights"]}]
    assert Path(settings["weights"]).read_bytes() == CONTENT
    assert [each.method for each in makers.requested].count("GET") == 1
    assert CliRunner().invoke(application, ["rewards", "fetch", "nothing"]).exit_code == 2
