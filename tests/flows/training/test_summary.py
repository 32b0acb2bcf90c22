from pathlib import Path
from typing import Any

import pytest

from flows.training.summary import TrainSummary


def facts(**changes: Any) -> dict[str, str]:
    known: dict[str, Any] = {
        "run": "r",
        "iterations": 3,
        "reward_first": 0.25,
        "reward_last": 0.75,
        "heldout_before": 0.5,
        "heldout_after": 0.375,
        "heldout_baselines": {"blank": 0.125},
        "policy_digest": "0123456789abcdef0123",
        "seconds": {"total": 12.34, "rollouts": 5.0},
        "folder": "/elsewhere/r",
        "contact_sheet": None,
        "heldout_texts": None,
        "guardrails_plot": None,
        "hacking": [],
        "stopped_early": False,
        "quarantined": [],
        "reused": {},
    }
    return dict(TrainSummary(**known | changes).report().facts)


def test_rewards_times_and_where_to_look() -> None:
    assert facts(reused={"other": 2}) == {
        "reward, first → last iteration": "0.250 → 0.750 (+0.500)",
        "held-out reward, before → after": "0.500 → 0.375 (-0.125)",
        "held-out reward, blank images": "0.125",
        "seconds, total": "12.3",
        "seconds, rollouts": "5.0",
        "reused from run other": "2 iterations",
        "policy digest": "0123456789abcdef",
        "stored in": "/elsewhere/r",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, "/elsewhere/r/file") for field in ("contact_sheet", "heldout_texts", "guardrails_plot")),
        *((field, ["a reason"]) for field in ("hacking", "quarantined")),
    ],
)
def test_each_file_and_each_reason(field: str, value: Any) -> None:
    assert (value if isinstance(value, str) else value[0]) in facts(**{field: value}).values()


def test_a_folder_below_the_working_directory_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert facts(folder=str(tmp_path / "runs" / "r"))["stored in"] == "runs/r"
