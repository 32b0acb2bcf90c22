"""Bits flipped all over a run that is then started again: it ends the same, and names the damaged files."""

import random
from pathlib import Path

import pytest

from tests.flows.conftest import Runs, flip
from tests.flows.flips.conftest import SETTINGS, Evaluated

pytestmark = pytest.mark.slow


def files_of(runs: Runs) -> list[Path]:
    return sorted(path for path in runs.root.rglob("*") if path.is_file() and path.stat().st_size > 0)


def is_set_aside(path: Path) -> bool:
    """Whether it is in quarantine, or in an earlier run."""
    return any(part == "quarantine" or "~" in part for part in path.parts)


def one_per_artifact(evaluated: Evaluated, runs: Runs, chance: random.Random) -> list[Path]:
    """One file of each artifact of the training; a manifest that is damaged as well would be named instead."""
    files = chance.sample(evaluated.files(), len(evaluated.files()))
    chosen = {artifact: runs.path(file) for artifact, file in files if not artifact.startswith("rescored/")}
    return sorted(chosen.values())


def test_two_hundred_bits_by_rounds(copied: Runs, evaluated: Evaluated) -> None:
    chance, flips = random.Random(23), 0
    artifacts = {copied.path(file) for _, file in evaluated.files()}
    for number in range(9):
        if named := number < 5:
            chosen = one_per_artifact(evaluated, copied, chance)
        else:
            # A file of an artifact whose record is damaged as well is not read, so it is not named.
            chosen = [path for path in files_of(copied) if path not in artifacts and not is_set_aside(path)]
        for path in chosen:
            flip(path, chance)
        before = len(copied.reasons())
        evaluated.require_same_end(copied, copied.start(**SETTINGS))
        reasons = copied.reasons()[before:]
        for path in chosen if named else ():
            assert any(path.name in reason for reason in reasons), path
        flips += len(chosen)
    assert flips >= 200
    assert copied.start(**SETTINGS).stages == ()


def test_a_bit_in_every_file_at_once(copied: Runs, evaluated: Evaluated) -> None:
    chance, files = random.Random(23), files_of(copied)
    for path in files:
        flip(path, chance)
    assert len(files) > 50
    evaluated.require_same_end(copied, copied.start(**SETTINGS))
    again = copied.start(**SETTINGS)
    assert again.stages == ()
    evaluated.require_same_end(copied, again)


def test_a_bit_in_any_file_and_a_start_time_and_again(copied: Runs, evaluated: Evaluated) -> None:
    chance = random.Random(24)
    for _ in range(24):
        present = files_of(copied)
        kept = [path for path in present if not is_set_aside(path)]
        # Half of them among the moved files as well: nothing is restored damaged.
        flip(chance.choice(chance.choice((kept, present))), chance)
        evaluated.require_same_end(copied, copied.start(**SETTINGS))
