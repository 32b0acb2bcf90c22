"""What an export says of how it was verified: what was found, and whether that still is about this policy."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flows.export.evaluated import verification_section
from flows.export.plan import plan_export
from flows.requests import ExportRequest
from tasks.reports.report import markdown_of
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import dump_checked
from tasks.verification.card import verification_file
from tasks.verification.records import Difference, Machine, StageVerification, VerificationReport
from tests.flows.conftest import refused
from tests.flows.export.test_contents import stored

MACHINE = Machine(code="c0ffee", processor="a CPU, AVX2, 1 thread", versions={"torch": "2.0", "bitsandbytes": "none"})
EQUAL = StageVerification(
    kind="update", title="iteration 2: update policy", folder="policies/000002", level="equal", seconds=1.0
)
DIFFERS = StageVerification(
    kind="rewards",
    title="iteration 1: score answer",
    folder="iteration_000001/rewards/answer",
    level="differs",
    differences=(
        Difference(
            place="scores.parquet, value", sample_id="i000001.p0000.s01", stored="1.0", computed="0.5", count=1, total=8
        ),
    ),
    cause="the table was edited after it was written",
)
FOLLOWS = StageVerification(
    kind="advantages",
    title="iteration 1: compute advantages",
    folder="iteration_000001/advantages",
    level="differs",
    follows="iteration 1: score answer",
)
UNTRIED = StageVerification(
    kind="rewards", title="x", folder="iteration_000002/rewards/judge", level="untried", reason="its server is gone"
)


def verified(**changes: Any) -> VerificationReport:
    """A complete verification of the run `own`, without differences unless it is changed."""
    values = {
        "run": "own",
        "lineage": None,
        "policies": {1: f"{1:064d}", 2: f"{2:064d}"},
        "last_version": 2,
        "fingerprints": {"update policy": "f" * 64},
        "made_by": (MACHINE,),
        "verified_by": MACHINE,
        "at": datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        "artifacts": 12,
        "problems": (),
        "stages": (EQUAL,),
        "chosen": "all",
        "tolerance": 0.0,
        "complete": True,
        "seconds": 5.0,
    }
    return VerificationReport.model_validate({**values, **changes})


def section(root: Path, report: VerificationReport | None) -> str:
    """The card's part about the run `own` with this stored verification."""
    stored(root, "own")
    if report is not None:
        content = dump_checked(report.model_dump(mode="json"))
        ArtifactStore(str(root), "own").write_file(verification_file("own"), content, shared=True)
    return markdown_of(
        verification_section(plan_export(ExportRequest(run="own", folder=str(root / "x"), root=str(root))))
    )


def test_what_was_verified_is_a_table_by_stage(tmp_path: Path) -> None:
    found = section(tmp_path, verified(stages=(EQUAL, UNTRIED)))
    assert "| stage | stages | equal | rounding | differs | not tried | iterations |" in found
    assert "| update | 1 | 1 | 0 | 0 | 0 | 2 |" in found
    assert "| rewards | 1 | its server is gone |" in found
    assert "| verified | 2026-01-02 03:04 UTC, in 5 s |" in found
    assert "| packages | torch 2.0 |" in found
    assert "does not vouch" not in found
    # A sample of the updates says nothing against the others.
    assert "does not vouch" not in section(tmp_path / "sample", verified(policies={1: f"{1:064d}"}))
    assert "## Differences" not in found


def test_a_difference_is_named_first_and_at_its_root(tmp_path: Path) -> None:
    found = section(tmp_path, verified(stages=(DIFFERS, FOLLOWS)))
    notice, _, rest = found.partition("## Differences")
    assert "It found differences: 1 stage, named below." in notice
    row = "i000001.p0000.s01, scores.parquet, value: stored 1.0, computed 0.5 (1 of 8)"
    assert row in rest.replace("\\", "")
    assert "Further stages that follow from these: 1." in rest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policies": {1: f"{1:064d}"}, "last_version": 1}, "It is older than what the run did since, iterations 2;"),
        ({"policies": {1: f"{1:064d}", 2: "e" * 64}}, "Version 2 has other weights than those that were verified"),
        ({"lineage": "other"}, "It is of another run of this name"),
        ({"complete": False}, "It was stopped before"),
        ({"problems": ("config.yaml is not the recorded one",)}, "config.yaml is not the recorded one"),
    ],
)
def test_what_speaks_against_a_verification_is_said_first(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = section(tmp_path, verified(**changes)).replace("\\", "")
    assert said in found.partition("## Stages")[0]


def test_a_run_that_nobody_verified_says_how_to(tmp_path: Path) -> None:
    assert "grpo verify own" in section(tmp_path, None)


def test_a_changed_verification_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    section(tmp_path, verified())
    file = tmp_path / verification_file("own")
    file.write_text(json.dumps({**json.loads(file.read_text()), "artifacts": 13}))
    (error,) = refused(lambda: plan_export(ExportRequest(run="own", folder=str(tmp_path / "x"), root=str(tmp_path))))
    assert error.place == ".verifications/own.json"
