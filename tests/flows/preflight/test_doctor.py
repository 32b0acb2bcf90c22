"""`grpo doctor`: what it finds, the memory it prints for every shipped file, and that looking changes nothing."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from flows.command_line.main import application
from tests.flows.conftest import REPOSITORY, TINY


@pytest.fixture(autouse=True)
def nothing_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A large disk, but no GPU, no server and no downloaded model."""
    with_free_space(monkeypatch, 1000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def with_free_space(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=gib * 2**30))


def examined(config: Path, *overrides: str) -> tuple[int, dict[str, object], dict[str, str]]:
    """Exit code, the JSON line, and what to do about each finding that is not healthy, by subject."""
    sets = [part for override in overrides for part in ("--set", override)]
    result = CliRunner().invoke(application, ["doctor", str(config), *sets, "--json"])
    told = json.loads(result.stdout.splitlines()[-1])
    unhealthy = {finding["subject"]: finding["hint"] for finding in told["findings"] if not finding["healthy"]}
    assert all(unhealthy.values()), "every finding that is not healthy has a hint"
    return result.exit_code, told, unhealthy


def test_nothing_stands_in_the_way_of_the_tiny_model(tmp_path: Path) -> None:
    code, told, unhealthy = examined(TINY, f"storage.root={tmp_path}/runs")
    assert (code, told["healthy"], unhealthy) == (0, True, {})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("name", "gib"), [("glm_image_80gb", (40, 80)), ("glm_image_141gb", (70, 131))])
def test_memory_is_told_where_the_weights_are_not(tmp_path: Path, name: str, gib: tuple[int, int]) -> None:
    code, told, unhealthy = examined(REPOSITORY / "configs" / f"{name}.yaml", f"storage.root={tmp_path}")
    assert code == 2
    assert "hf download zai-org/GLM-Image" in unhealthy.pop("weights")
    assert unhealthy == {}
    assert gib[0] < int(str(told["memory_bytes"])) / 2**30 < gib[1]


def test_policies_count_towards_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """95 M adapter parameters and two moments each, in fp32, are 1.1 GB an iteration; the images are 10 GB in all."""
    with_free_space(monkeypatch, 100)
    config = REPOSITORY / "configs" / "glm_image_80gb.yaml"
    _, _, unhealthy = examined(config, f"storage.root={tmp_path}")
    assert "storage" in unhealthy
    _, _, unhealthy = examined(config, f"storage.root={tmp_path}", "run.iterations=50")
    assert "storage" not in unhealthy


def test_each_problem_is_told_with_its_mend(tmp_path: Path) -> None:
    missing = "data.prompts=missing.txt"
    code, _, unhealthy = examined(TINY, f"storage.root={tmp_path}", missing, "placement.device=cuda")
    assert code == 2
    assert unhealthy.keys() >= {"inputs", "memory"}


def test_a_root_of_an_unknown_kind(tmp_path: Path) -> None:
    code, _, unhealthy = examined(TINY, "storage.root=nosuch://runs")
    assert code == 2
    assert "URL of a known kind" in unhealthy["storage"]
