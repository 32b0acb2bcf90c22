"""Bits flipped all over a run that is then started again: it comes to the same end, and names them."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.flows.conftest import Runs
from tests.flows.flips.conftest import SETTINGS, Evaluated
from tests.flows.flips.damage import rot
from tests.flows.flips.ledger import Flip, Outcome, kind_of

pytestmark = pytest.mark.slow
AT_LEAST = 200
OF_ARTIFACTS, OF_OTHERS = 5, 4
"""Rounds; a file of an artifact whose record is damaged as well is not asked for, so it is not named."""


def files_of(runs: Runs) -> list[Path]:
    return sorted(path for path in runs.root.rglob("*") if path.is_file() and path.stat().st_size > 0)


def of_artifacts(evaluated: Evaluated, runs: Runs, chance: random.Random) -> list[Path]:
    """One file of each artifact of the training; a manifest that is damaged as well would be named in its place."""
    files = chance.sample(evaluated.files(), len(evaluated.files()))
    chosen = {artifact: runs.path(file) for artifact, file in files if not artifact.startswith("rescored/")}
    return sorted(chosen.values())


def of_others(evaluated: Evaluated, runs: Runs) -> list[Path]:
    """Each file that belongs to no artifact."""
    held = {runs.path(file) for _, file in evaluated.files()}
    return [path for path in files_of(runs) if path not in held and not {"quarantine", "previous"} & set(path.parts)]


def test_two_hundred_bits_by_rounds(
    copied: Runs, evaluated: Evaluated, noted: Callable[[Sequence[Flip]], None]
) -> None:
    chance, flips = random.Random(23), []
    for number in range(OF_ARTIFACTS + OF_OTHERS):
        named = number < OF_ARTIFACTS
        chosen = of_artifacts(evaluated, copied, chance) if named else of_others(evaluated, copied)
        for path in chosen:
            rot(path, chance)
        before = len(copied.reasons())
        evaluated.require_same_end(copied, copied.start(**SETTINGS))
        reasons = copied.reasons()[before:]
        for path in chosen if named else ():
            assert any(path.name in reason for reason in reasons), path
        files = [path.relative_to(copied.root).as_posix() for path in chosen]
        flips += [Flip(kind_of(file), Outcome.SAME_END) for file in files]
    noted(flips)
    assert len(flips) >= AT_LEAST
    assert copied.start(**SETTINGS).stages == ()


def test_a_bit_in_every_file_at_once(copied: Runs, evaluated: Evaluated) -> None:
    chance, files = random.Random(23), files_of(copied)
    for path in files:
        rot(path, chance)
    assert len(files) > 50
    evaluated.require_same_end(copied, copied.start(**SETTINGS))
    again = copied.start(**SETTINGS)
    assert again.stages == ()
    evaluated.require_same_end(copied, again)


def test_a_bit_in_any_file_and_a_start_time_and_again(copied: Runs, evaluated: Evaluated) -> None:
    chance = random.Random(24)
    for _ in range(24):
        present = files_of(copied)
        kept = [path for path in present if not {"quarantine", "previous"} & set(path.parts)]
        # Half of them among what was set aside as well: nothing comes home from there damaged.
        rot(chance.choice(chance.choice((kept, present))), chance)
        evaluated.require_same_end(copied, copied.start(**SETTINGS))
