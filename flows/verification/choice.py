"""Choose which stored stages are computed again, and what counts as rounding."""

import random
import re
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args

from configs.schema import ReplayConfig
from flows.requests import VerifyRequest
from grpo_core.errors import InputError
from tasks.runs.layout import RESCORED, parse_iteration
from tasks.runs.lookup import spans
from tasks.verification.records import StageKind

if TYPE_CHECKING:
    from flows.verification.stored_stages import StoredRun

KINDS: tuple[StageKind, ...] = get_args(StageKind)
_DRAWN_OF_EACH = 3

Candidate = tuple[StageKind, int, str | None]
"""A kind of stage, the iteration or version, and the rescoring that it belongs to; None: the run's own."""


def candidates(run: "StoredRun") -> Iterator[Candidate]:
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


def choose(request: VerifyRequest, run: "StoredRun") -> tuple[tuple[Candidate, ...], str]:
    """Return what is computed again in the order of the run, and say how it was chosen; InputError if nothing is."""
    kinds = _read_kinds(request.stages)
    every = [each for each in candidates(run) if each[0] in kinds]
    if not every:
        raise InputError("RUN", run.store.run, f"It has no stage of {', '.join(kinds)} that could be computed again.")
    asked = _read_iterations(request.iterations)
    if asked == "all":
        return tuple(every), f"all iterations: {', '.join(kinds)}"
    if isinstance(asked, range):
        return _of_range(asked, every, run)
    seed = request.seed if request.seed is not None else secrets.randbelow(2**31)
    draw = random.Random(seed)
    if asked is not None:
        drawn = draw.sample(every, min(asked, len(every)))
        said = f"{len(drawn)} of {len(every)} stages"
    else:
        by_kind = [[each for each in every if each[0] == kind] for kind in kinds]
        drawn = [each for own in by_kind for each in draw.sample(own, min(_DRAWN_OF_EACH, len(own)))]
        said = f"{_DRAWN_OF_EACH} iterations for each of {', '.join(kinds)}"
    chosen = {*drawn}
    return tuple(each for each in every if each in chosen), f"{said}, drawn with --seed {seed}"


def _of_range(asked: range, every: list[Candidate], run: "StoredRun") -> tuple[tuple[Candidate, ...], str]:
    picked = tuple(each for each in every if each[1] in asked)
    shown = f"{asked.start}:{asked.stop - 1}"
    if not picked:
        known = spans(sorted({number for _, number, _ in every}))
        raise InputError("--iterations", shown, f"{run.store.run} has {known}.")
    return picked, f"iterations {shown}: {', '.join(dict.fromkeys(kind for kind, _, _ in picked))}"


def _read_iterations(asked: str | None) -> range | int | Literal["all"] | None:
    """Return the chosen iterations, how many stages are drawn, all, or None for some of each kind."""
    if asked is None or asked == "all":
        return "all" if asked else None
    if found := re.fullmatch(r"sample:([1-9]\d{0,8})", asked):
        return int(found[1])
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", asked)
    if found and int(found[1]) <= int(found[2] or found[1]):
        return range(int(found[1]), int(found[2] or found[1]) + 1)
    hint = "Write all, one number, the first and the last as 3:10, or how many random stages as sample:9."
    raise InputError("--iterations", asked, hint)


def _read_kinds(stages: str | None) -> tuple[StageKind, ...]:
    if stages is None:
        return KINDS
    asked = [each.strip() for each in stages.split(",")]
    if unknown := [each for each in asked if each not in KINDS]:
        raise InputError("--stages", unknown[0], f"Name some of {', '.join(KINDS)}, with commas between.")
    return tuple(kind for kind in KINDS if kind in asked)


def check_options(request: VerifyRequest) -> None:
    """Refuse options that cannot be read, before a run is opened; raises as what reads them."""
    _read_kinds(request.stages)
    read_tolerance(request.tolerance, 0.0)
    _read_iterations(request.iterations)


def read_tolerance(given: str | None, default: float) -> float:
    """Return the largest distance that counts as rounding.

    Raises:
        InputError: it is neither `bits` nor a number.
    """
    if given is None:
        return default
    try:
        tolerance = 0.0 if given == "bits" else float(given)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < float("inf"):
        raise InputError("--tolerance", given, "Write bits, or a number of units in the last place.")
    return tolerance
