from pathlib import Path

import pytest

from tasks.reports.hacking import hacking_verdict
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tests.tasks.reports.made_runs import RunMaker

MEASURED = "rewards: [{reward: ssim, weight: 0}]\n"
TRAINED = "rewards: [{reward: ssim, weight: 1}]\n"
STOPPED = "guardrails: {on_fall: stop}\n"
RISES = (-0.2, -0.2, -0.2, 0.4, 0.4, 0.4)
FALLS, STAYS = (0.8, 0.8, 0.8, 0.4, 0.4, 0.4), (0.8, 0.81, 0.8, 0.8, 0.81, 0.8)


@pytest.mark.parametrize(
    ("settings", "rewards", "guardrail", "finding", "said"),
    [
        ("", (), (), "unknown", "no policy was evaluated"),
        (TRAINED, RISES, (), "unknown", "every held-out measure is trained on"),
        ("", RISES[:3], FALLS[:3], "unknown", "3 of the 4 evaluations"),
        ("", RISES, FALLS, "signs", "jpeg fell from 0.8 to 0.4 (-50%) and has been low since policy 3"),
        ("", RISES, STAYS, "none", "jpeg: 0.8 with policy 0, 0.8 with policy 5"),
        ("", RISES[::-1], FALLS, "none", "held-out reward: 0.9 with policy 0, 0.3 with policy 5"),
        (MEASURED, RISES, (), "none", "ssim: 0.3 with policy 0, 0.9 with policy 5"),
        (STOPPED, RISES, FALLS, "signs", "the run was stopped for it"),
        ("guardrails: {fall: 0.6}\n", RISES, FALLS, "none", "jpeg: 0.8 with policy 0"),
        ("guardrails: {fall: 7}\n", RISES, FALLS, "unknown", "guardrails.fall"),
    ],
)
def test_what_is_not_trained_on_decides(
    tmp_path: Path,
    settings: str,
    rewards: tuple[float, ...],
    guardrail: tuple[float, ...],
    finding: str,
    said: str,
) -> None:
    maker = RunMaker(tmp_path, settings=settings)
    for version, shift in enumerate(rewards):
        maker.evaluation(version, shift=shift)
    for version, mean in enumerate(guardrail):
        maker.guardrail(version, "jpeg", mean)
    verdict = hacking_verdict(read_run(RunReader(maker.store)))
    assert verdict.finding == finding
    assert any(said in reason for reason in verdict.reasons), verdict.reasons
