"""The gate before the first optimizer step: numbers by hand, causes, and what may not pass."""

import math
import pickle

import pytest
import torch

from grpo_core.errors import NonFiniteError
from grpo_core.parity import ParityError, ParityReport, ParityTolerance, measure_parity, require_parity

IDS = ("a", "b", "c")
MASK = torch.tensor([[True, True], [True, False], [True, True]])
STORED = torch.full((3, 2), -1.0)
TOLERANCE = ParityTolerance(max_difference=1e-2, mean_difference=1e-3)


def report_of(*differences: tuple[float, float]) -> ParityReport:
    return measure_parity(IDS, STORED, STORED + torch.tensor(differences), MASK)


def test_differences_by_hand() -> None:
    """Over the five unmasked tokens: 0, .5, -.25, 0, .25; the 9 is under the mask."""
    report = report_of((0.0, 0.5), (-0.25, 9.0), (0.0, 0.25))
    assert report.max_difference == 0.5
    assert report.mean_difference == pytest.approx(0.2)
    assert report.tokens == 5
    assert report.ratio_min == pytest.approx(math.exp(-0.25))
    assert report.ratio_max == pytest.approx(math.exp(0.5))
    assert report.worst_samples[0] == "a"
    assert report.metrics()["sampling/sampling_logp_difference/max"] == 0.5


@pytest.mark.parametrize(
    "tolerance", [ParityTolerance(0.4, 1.0), ParityTolerance(1.0, 0.1)], ids=["single token", "mean"]
)
def test_either_bound_refuses(tolerance: ParityTolerance) -> None:
    report = report_of((0.0, 0.5), (0.0, 0.0), (0.0, 0.5))
    with pytest.raises(ParityError):
        require_parity(report, tolerance)
    require_parity(report, ParityTolerance(0.5, 0.2001))


@pytest.mark.parametrize(
    ("maximum", "mean", "rows_apart", "cause"),
    [
        (7.8, 1.8, 8, "position_ids or attention_mask"),
        (2.2, 0.1, 4, "position_ids or attention_mask"),
        (0.48, 0.06, 8, "temperature"),
        (0.14, 0.0076, 5, "ids that can be sampled"),
        (0.352, 0.0392, 8, "weights other than those that sampled"),
        (0.3, 1e-3, 1, "a few rows only"),
        (9.0, 1.2, 2, "a few rows only"),
        (1.6e-2, 2.7e-3, 8, "another dtype"),
    ],
)
def test_the_likely_cause_fits_what_was_measured(maximum: float, mean: float, rows_apart: int, cause: str) -> None:
    report = ParityReport(maximum, mean, 1.0, 1.0, 100, 8, rows_apart, ("a",))
    assert cause in str(ParityError(report, TOLERANCE))


@pytest.mark.parametrize(
    ("maximum", "mean", "cause"),
    [
        (5.6, 0.58, "other prompts or tokens"),
        (0.48, 0.42, "window"),
        (4.6e-3, 2.3e-3, "guidance"),
        (3.1e-4, 1.9e-4, "adapters that were not loaded"),
        (2.0e-5, 1.7e-5, "another dtype"),
    ],
)
def test_the_likely_cause_of_denoising_steps(maximum: float, mean: float, cause: str) -> None:
    report = ParityReport(maximum, mean, 1.0, 1.0, 16, 8, 8, ("a",), "denoising")
    message = str(ParityError(report, TOLERANCE))
    assert cause in message
    assert "over 16 denoising steps" in message


def test_rows_that_are_apart_are_counted() -> None:
    report = report_of((0.0, 0.5), (-0.04, 9.0), (0.06, 0.0))
    assert (report.rows, report.rows_apart) == (3, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["stored", "recomputed"])
def test_what_is_not_finite_is_refused_by_name(value: float, side: str) -> None:
    damaged = STORED.clone()
    damaged[1, 0] = value
    pair = (damaged, STORED) if side == "stored" else (STORED, damaged)
    with pytest.raises(NonFiniteError, match=f"{side} log-prob is not finite for 1 sample") as caught:
        measure_parity(IDS, *pair, MASK)
    assert caught.value.sample_ids == ("b",)


def test_what_is_not_finite_under_the_mask_is_not_looked_at() -> None:
    damaged = STORED.clone()
    damaged[1, 1] = math.nan
    assert measure_parity(IDS, damaged, damaged, MASK).max_difference == 0.0


def test_an_empty_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="loss mask is empty"):
        measure_parity(IDS, STORED, STORED, torch.zeros_like(MASK))


def test_the_error_survives_another_process() -> None:
    error = ParityError(report_of((0.0, 0.5), (0.0, 0.0), (0.0, 0.0)), TOLERANCE)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
