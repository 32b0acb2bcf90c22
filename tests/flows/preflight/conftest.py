"""A machine for the tests of `grpo doctor`, and its diagnoses."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.loader import read_config
from flows.preflight.doctor import Diagnosis, examine


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A large disk, but no GPU, no server and no downloaded model."""
    with_free_space(monkeypatch, 1000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def with_free_space(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=gib * 2**30))


def examined(config: Path, *overrides: str) -> tuple[Diagnosis, dict[str, str]]:
    """The diagnosis, and the hints of its problems by subject."""
    diagnosis = examine(read_config(config, overrides))
    hints = {finding.subject: finding.hint for finding in diagnosis.findings if not finding.healthy}
    assert all(hints.values()), "every problem has a hint"
    return diagnosis, hints
