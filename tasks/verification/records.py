"""What a verification found: how equal a stage is, its differences, and all stages of a run together."""

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

Level = Literal["equal", "rounding", "differs", "untried"]
"""Equal to the bit; equal within rounding, which another machine or package explains; neither; not computed again."""

StageKind = Literal["rollouts", "rewards", "advantages", "update", "evaluation"]


class Difference(BaseModel):
    """Values of one column, tensor or file that differ, with the first of them.

    Attributes:
        place: file and column or tensor, `scores.parquet, value`.
        sample_id: the first row that differs; None for what has no rows.
        index: where within the row or tensor, `token 12` or `[3, 0]`; None for a single value.
        stored, computed: the first two values that differ, as text.
        count: how many values differ, of `total`.
        largest: largest distance of two values in units in the last place of float32 at the largest magnitude that the
            column or tensor has; of weights and optimizer states the share of the update that differs, in units of
            2^-23; infinite where only one side has a number, None for what are no numbers.
        allowance: how many times the tolerance rounding may reach here: more than once where values are rounded to
            fewer digits before they are stored, or where small gradients are divided by their own size.
    """

    model_config = ConfigDict(frozen=True)

    place: str
    sample_id: str | None = None
    index: str | None = None
    stored: str
    computed: str
    count: int
    total: int
    largest: float | None = None
    allowance: float = 1.0


class StageVerification(BaseModel):
    """One stored stage, and what computing it again gave.

    Attributes:
        title: as Prefect's UI shows it, `iteration 3: score r2`.
        folder: the stored artifact's folder in the run.
        differences: those of the stored and the computed artifact, in the order of what later stages read.
        cause: why it probably differs, or what the reason for rounding may be.
        follows: title of the stage whose difference explains this one; None where it is a root.
        reason: why it was not computed again, and how it can be; only where untried.
        seconds: that computing took.
    """

    model_config = ConfigDict(frozen=True)

    kind: StageKind
    title: str
    folder: str
    level: Level
    differences: tuple[Difference, ...] = ()
    cause: str | None = None
    follows: str | None = None
    reason: str | None = None
    seconds: float = 0.0


class Machine(BaseModel):
    """What computed: code, packages and processor."""

    model_config = ConfigDict(frozen=True)

    code: str | None  # commit of the checkout; None outside of one
    processor: str | None  # processor, instruction set and threads, or the GPU; None for runs that did not record it
    versions: Mapping[str, str]  # of Python and the libraries


class VerificationReport(BaseModel):
    """A run, what of it was checked, and at which level.

    Attributes:
        policies: digest of the weights of the policy versions whose updates were computed again.
        last_version: the last policy version that the run had then.
        fingerprints: of the code of each stage that the run recorded.
        made_by: the machines that the run was started on; `verified_by` the one that computed again.
        artifacts: stored artifacts whose checksums and joins were checked.
        problems: what they and the recorded settings showed without computing: damaged files, joins without partner,
            settings, prompts or policies that are not the recorded ones.
        stages: those chosen to be computed again, in the order of the run.
        chosen: how they were chosen, with the seed of a random choice.
        tolerance: largest `Difference.largest` that counts as rounding.
        complete: whether everything chosen was tried; False after an interrupt or a full disk.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    lineage: str | None
    policies: Mapping[int, str]
    last_version: int | None = None
    fingerprints: Mapping[str, str]
    made_by: tuple[Machine, ...]
    verified_by: Machine
    at: datetime
    artifacts: int
    problems: tuple[str, ...]
    stages: tuple[StageVerification, ...]
    chosen: str
    tolerance: float
    complete: bool
    seconds: float

    @property
    def roots(self) -> tuple[StageVerification, ...]:
        """The stages that differ and follow from no other."""
        return tuple(each for each in self.stages if each.level == "differs" and each.follows is None)

    @property
    def exit_code(self) -> int:
        """0: what was tried is equal, or within rounding; 1: something differs; 2: nothing could be tried."""
        if not self.is_equal:
            return 1
        tried = [each for each in self.stages if each.level != "untried"]
        return 0 if tried and self.complete else 2

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.problems and not any(each.level == "differs" for each in self.stages)
