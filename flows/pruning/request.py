"""The options of `grpo prune` as rules; every mistake is reported before anything is read."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from pydantic import Field
from typer import Option

from configs.validation import Section
from flows.pipeline.requests import Root, Runs
from grpo_core.errors import InputError, raise_all

POLICIES_LAST = 2
"""Versions kept at the end of a run by default."""

_AGE = re.compile(r"(\d{1,6})([dhi])")


@dataclass(frozen=True)
class Age:
    """A minimum age of what is deleted: in days (`d`), hours (`h`), or iterations back from the last one (`i`)."""

    number: int
    unit: str

    def reached(self, made: datetime, now: datetime, iteration: int | None = None, last: int | None = None) -> bool:
        """Return whether something is at least as old; it may belong to an iteration of a run with a last one."""
        if self.unit == "i":
            return iteration is not None and last is not None and iteration <= last - self.number
        return now - made >= timedelta(hours=self.number * (24 if self.unit == "d" else 1))


def read_age(text: str | None) -> Age | None:
    """Read an age such as 30d, 12h or 20i; None for None and for any other text."""
    found = _AGE.fullmatch(text.strip()) if text is not None else None
    return Age(int(found[1]), found[2]) if found else None


class PruneRequest(Section):
    """What may be deleted unless something needs it."""

    sources: Runs
    policies_every: Annotated[int | None, Option(metavar="N")] = Field(
        None, description="keep policy versions N, 2N, ... and the last; the others are deleted"
    )
    policies_last: Annotated[int | None, Option(metavar="K")] = Field(
        None, description="number of versions kept at the end; 2 by default"
    )
    images_older_than: Annotated[str | None, Option(metavar="AGE")] = Field(
        None, description="delete images this old: 30d, 12h, or 20i for all but the last 20 iterations"
    )
    states_older_than: Annotated[str | None, Option(metavar="AGE")] = Field(
        None, description="delete latents of denoising steps this old, without which iterations cannot be replayed"
    )
    evaluations: Annotated[bool, Option("--evaluations")] = Field(
        False, description="also delete images of evaluations, except the first, the best and the last"
    )
    previous_older_than: Annotated[str | None, Option(metavar="AGE")] = Field(
        None, description="delete folders this old in previous/ and quarantine/: 30d or 12h"
    )
    dry_run: Annotated[bool, Option("--dry-run")] = Field(
        False, description="report what would be deleted, and change nothing"
    )
    root: Root = "runs"

    @property
    def last(self) -> int | None:
        """Number of versions to keep at the end; None keeps all versions."""
        if self.policies_every is None and self.policies_last is None:
            return None
        return self.policies_last or POLICIES_LAST

    @property
    def policy_rule(self) -> str:
        """The rule for policies, as options."""
        every = f"--policies-every {self.policies_every} " if self.policies_every is not None else ""
        return f"{every}--policies-last {self.last}" if self.last else ""

    @property
    def image_rule(self) -> str:
        """The rule for images, as options."""
        if self.images_older_than is None:
            return ""
        return f"--images-older-than {self.images_older_than}" + (" --evaluations" if self.evaluations else "")

    @property
    def states_rule(self) -> str:
        """The rule for states of denoising steps, as options."""
        return "" if self.states_older_than is None else f"--states-older-than {self.states_older_than}"


def check_request(request: PruneRequest) -> None:
    """Check the options.

    Raises:
        InputError: no rule, a number below 1, an age that cannot be read, a run named twice.
    """
    raise_all(_problems(request))


def _problems(request: PruneRequest) -> Iterator[InputError]:
    numbers = {"--policies-every": request.policies_every, "--policies-last": request.policies_last}
    of_iterations = {
        "--images-older-than": request.images_older_than,
        "--states-older-than": request.states_older_than,
    }
    ages = {**of_iterations, "--previous-older-than": request.previous_older_than}
    if all(value is None for value in (*numbers.values(), *ages.values())):
        hint = (
            "Say what may be deleted: --policies-every N, --policies-last K, --images-older-than AGE, "
            "--states-older-than AGE or --previous-older-than AGE; add --dry-run to see what that would delete."
        )
        yield InputError("grpo prune", "no rule", hint)
    for option, number in numbers.items():
        if number is not None and number < 1:
            yield InputError(option, number, "Give 1 or more; the last version is always kept.")
    for option, text in ages.items():
        if text is None:
            continue
        age = read_age(text)
        if age is None:
            back = "; or iterations back from the last, as 20i" if option in of_iterations else ""
            yield InputError(option, text, f"Write days or hours, as 30d or 12h{back}.")
        elif age.unit == "i" and option not in of_iterations:
            yield InputError(option, text, "These folders belong to no iteration; write days or hours, as 30d.")
    if request.evaluations and request.images_older_than is None:
        yield InputError("--evaluations", True, "Say how old their images must be with --images-older-than.")
    if len(set(request.sources)) < len(request.sources):
        yield InputError("RUN", list(request.sources), "A run is named twice; name each once.")
