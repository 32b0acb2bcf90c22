"""Choose which stored stages are computed again, and what counts as rounding."""

import random
import re
import secrets
from collections.abc import Iterator
from typing import get_args

from configs.schema import ReplayConfig
from flows.requests import VerifyRequest
from flows.verification.stored_stages import StoredRun
from grpo_core.errors import InputError
from tasks.runs.layout import RESCORED, parse_iteration
from tasks.runs.lookup import spans
from tasks.verification.compare import DEFAULT_TOLERANCE
from tasks.verification.records import StageKind

KINDS: tuple[StageKind, ...] = get_args(StageKind)
_DRAWN_OF_EACH = 3

Candidate = tuple[StageKind, int, str | None]
"""A kind of stage, the iteration or version, and the rescoring that it belongs to; None: the run's own."""


def candidates(run: StoredRun) -> Iterator[Candidate]:
    """Yield every kind of stage of every iteration, version and rescoring in order, by the names of folders alone."""
    reader, first = run.reader, run.config.first_version
    evaluated, policies = set(reader.evaluations()), set(reader.policies())
    if first in evaluated:
        yield "evaluation", first, None
    for iteration in sorted({*reader.iterations()} | {each for each in policies if each > first}):
        if not isinstance(run.config, ReplayConfig):
            yield "rollouts", iteration, None
            yield "rewards", iteration, None
        yield "advantages", iteration, None
        if iteration in policies:
            yield "update", iteration, None
        if iteration in evaluated:
            yield "evaluation", iteration, None
    for name in reader.rescorings():
        numbers = (parse_iteration(each) for each in reader.names(f"{RESCORED}/{name}"))
        for iteration in sorted(number for number in numbers if number is not None):
            yield "rewards", iteration, name
            yield "advantages", iteration, name


def choose(request: VerifyRequest, run: StoredRun) -> tuple[tuple[Candidate, ...], str]:
    """Return what is computed again in the order of the run, and say how it was chosen; InputError if nothing is."""
    kinds = _read_kinds(request.stages)
    every = [each for each in candidates(run) if each[0] in kinds]
    if not every:
        raise InputError("RUN", run.store.run, f"It has no stage of {', '.join(kinds)} that could be computed again.")
    asked = request.iterations
    if asked == "all":
        return tuple(every), f"all iterations: {', '.join(kinds)}"
    if asked is not None and not asked.startswith("sample:"):
        return _of_range(asked, every, run)
    seed = request.seed if request.seed is not None else secrets.randbelow(2**31)
    draw = random.Random(seed)
    if asked is not None:
        drawn = draw.sample(every, min(_read_count(asked), len(every)))
        said = f"{len(drawn)} of {len(every)} stages"
    else:
        by_kind = [[each for each in every if each[0] == kind] for kind in kinds]
        drawn = [each for own in by_kind for each in draw.sample(own, min(_DRAWN_OF_EACH, len(own)))]
        said = f"{_DRAWN_OF_EACH} stages of each of {', '.join(kinds)}"
    return tuple(each for each in every if each in drawn), f"{said}, drawn with --seed {seed}"


def _of_range(asked: str, every: list[Candidate], run: StoredRun) -> tuple[tuple[Candidate, ...], str]:
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", asked)
    if not found:
        raise InputError("--iterations", asked, "Write all, one number, the first and the last as 3:10, or sample:9.")
    chosen = range(int(found[1]), int(found[2] or found[1]) + 1)
    picked = tuple(each for each in every if each[1] in chosen)
    if not picked:
        known = spans(sorted({number for _, number, _ in every}))
        raise InputError("--iterations", asked, f"{run.store.run} has {known}.")
    return picked, f"iterations {asked}: {', '.join(dict.fromkeys(kind for kind, _, _ in picked))}"


def _read_count(asked: str) -> int:
    count = asked.partition(":")[2]
    if not re.fullmatch(r"[1-9]\d{0,8}", count):
        raise InputError("--iterations", asked, "Write how many random stages, as in sample:9.")
    return int(count)


def _read_kinds(stages: str | None) -> tuple[StageKind, ...]:
    if stages is None:
        return KINDS
    asked = [each.strip() for each in stages.split(",")]
    if unknown := [each for each in asked if each not in KINDS]:
        raise InputError("--stages", unknown[0], f"Name some of {', '.join(KINDS)}, with commas between.")
    return tuple(kind for kind in KINDS if kind in asked)


def read_tolerance(given: str | None, *, rounds: bool) -> float:
    """Return the largest distance that counts as rounding; by default 0, unless the run and this machine round apart.

    Raises:
        InputError: it is neither `bits` nor a number.
    """
    if given is None:
        return DEFAULT_TOLERANCE if rounds else 0.0
    try:
        tolerance = 0.0 if given == "bits" else float(given)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < float("inf"):
        raise InputError("--tolerance", given, "Write bits, or a number of units in the last place.")
    return tolerance
