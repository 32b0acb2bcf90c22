"""What is retained of a run: by the options of `grpo prune`, or by `run.keep_policies`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from pydantic import Field
from typer import Option

from configs.validation import Section
from flows.requests import Root, Runs
from grpo_core.errors import InputError, raise_all

POLICIES_LAST = 2
"""Versions kept at the end of a run by default."""

_AGE = re.compile(r"(\d{1,6})([dhi])")


@dataclass(frozen=True)
class Age:
    """A minimum age of what is deleted: in days (`d`), hours (`h`), or iterations back from the last one (`i`)."""

    number: int
    unit: str

    def reached(self, made: datetime, now: datetime, iteration: int, last: int) -> bool:
        """Return whether something that an iteration made is at least as old; `last` is the run's last iteration."""
        if self.unit == "i":
            return iteration <= last - self.number
        return now - made >= timedelta(hours=self.number * (24 if self.unit == "d" else 1))


def read_age(text: str | None) -> Age | None:
    """Read an age such as 30d, 12h or 20i; None for None and for any other text."""
    found = _AGE.fullmatch(text.strip()) if text is not None else None
    return Age(int(found[1]), found[2]) if found else None


@dataclass(frozen=True)
class Retention:
    """What is retained of a run, apart from what something needs.

    Attributes:
        by: the command or the setting that says so, which tombstones name.
        last: number of policy versions at the end; None: all versions.
        every: versions N, 2N, ...; None: none of them.
        best: whether the version with the best held-out reward is retained.
        images, states: age from which images of iterations, or latents of denoising steps, are deleted; None: none are.
    """

    by: str
    last: int | None = None
    every: int | None = None
    best: bool = True
    images: Age | None = None
    states: Age | None = None


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
    dry_run: Annotated[bool, Option("--dry-run")] = Field(
        False, description="report what would be deleted, and change nothing"
    )
    root: Root = "runs"

    @property
    def rules(self) -> dict[str, int | str]:
        """The given rules by their options."""
        given = {
            "--policies-every": self.policies_every,
            "--policies-last": self.policies_last,
            "--images-older-than": self.images_older_than,
            "--states-older-than": self.states_older_than,
        }
        return {option: value for option, value in given.items() if value is not None}

    @property
    def retention(self) -> Retention:
        """What the options retain."""
        some = self.policies_every is not None or self.policies_last is not None
        return Retention(
            by=" ".join(["grpo prune", *(f"{option} {value}" for option, value in self.rules.items())]),
            last=(self.policies_last or POLICIES_LAST) if some else None,
            every=self.policies_every,
            images=read_age(self.images_older_than),
            states=read_age(self.states_older_than),
        )


def check_request(request: PruneRequest) -> None:
    """Refuse options without a rule, a number below 1, or an age that cannot be read."""
    raise_all(_problems(request))


def _problems(request: PruneRequest) -> Iterator[InputError]:
    if not request.rules:
        hint = "Give --policies-every N, --policies-last K, --images-older-than AGE or --states-older-than AGE."
        yield InputError("grpo prune", "no rule", hint)
    for option, value in request.rules.items():
        if isinstance(value, int) and value < 1:
            yield InputError(option, value, "Give 1 or more; the last version is always kept.")
        if isinstance(value, str) and read_age(value) is None:
            hint = "Write days or hours, as 30d or 12h; or iterations back from the last, as 20i."
            yield InputError(option, value, hint)
