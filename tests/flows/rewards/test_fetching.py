"""`grpo rewards fetch`: asks, downloads each file once, and says which setting names it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.command_line.main import application
from grpo_core.rewards.similarity import lpips
from grpo_core.rewards.weights.files import PublishedWeights
from tests.grpo_core.rewards.stub import Stub, serve
from tests.grpo_core.rewards.weights.test_fetch import CONTENT, NAME, as_the_makers


@pytest.fixture
def makers() -> Iterator[Stub]:
    with serve() as stub:
        stub.respond = as_the_makers
        yield stub


def test_it_asks_first_and_fetches_what_a_file_names(
    makers: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = PublishedWeights(NAME, "the makers", f"{makers.url}/{NAME}", licence="BSD")
    monkeypatch.setitem(lpips.TRUNKS, "alex", published)  # type: ignore[arg-type]
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
    assert [each.method for each in makers.requested].count("GET") == 1
    assert CliRunner().invoke(application, ["rewards", "fetch", "nothing"]).exit_code == 2
