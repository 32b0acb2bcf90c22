"""What `grpo prune` is asked for -> rules to prune by, or every mistake at once, before anything is looked at."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from grpo_core.errors import InputError, InputErrors

POLICIES_LAST = 2
"""Versions that stay at the end of a run, where nothing else is said."""

_AGE = re.compile(r"(\d{1,6})(d|h|i)")


@dataclass(frozen=True)
class Age:
    """How old something must be to go.

    Attributes:
        text: as it was given.
        time: since it was made; None where iterations are meant.
        iterations: back from the last one; None where a time is meant.
    """

    text: str
    time: timedelta | None
    iterations: int | None

    def reached(self, made: datetime, now: datetime, iteration: int | None = None, last: int | None = None) -> bool:
        """Whether something is as old.

        Args:
            made: when.
            now: the present.
            iteration: that it belongs to, where it belongs to one.
            last: iteration of the run.
        """
        if self.time is not None:
            return now - made >= self.time
        assert self.iterations is not None, "an age is one of the two"
        return iteration is not None and last is not None and iteration <= last - self.iterations


@dataclass(frozen=True)
class PruneRequest:
    """The options as they were given.

    Attributes:
        sources: runs under the root, or paths of their folders.
        root: where runs are kept.
        policies_every: keep every so many versions; None for no such version.
        policies_last: keep so many at the end; None for the default.
        images_older_than: age of rollouts whose images go; None for none.
        evaluations: whether images of evaluations go too.
        set_aside_older_than: age of what was set aside; None for none.
        dry_run: tell, and change nothing.
    """

    sources: tuple[str, ...]
    root: str = "runs"
    policies_every: int | None = None
    policies_last: int | None = None
    images_older_than: str | None = None
    evaluations: bool = False
    set_aside_older_than: str | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class PruneRules:
    """What may go, as far as nothing needs it.

    Attributes:
        every: policy versions that are multiples of it stay; None: none for that.
        last: versions at the end that stay; None: all stay.
        images: age of rollouts whose images go.
        evaluations: whether those of evaluations go too.
        set_aside: age.
    """

    every: int | None
    last: int | None
    images: Age | None
    evaluations: bool
    set_aside: Age | None

    def keeps(self, version: int) -> bool:
        """Whether every so many versions are kept, and this is one of them."""
        return self.every is not None and version % self.every == 0

    @property
    def of_policies(self) -> str:
        """The rule for policies, as options."""
        every = f"--policies-every {self.every} " if self.every is not None else ""
        return f"{every}--policies-last {self.last}"

    @property
    def of_images(self) -> str:
        """The rule for images, as options."""
        assert self.images is not None, "images are pruned"
        return f"--images-older-than {self.images.text}" + (" --evaluations" if self.evaluations else "")


def read_rules(request: PruneRequest) -> PruneRules:
    """The rules that the options make.

    Raises:
        InputErrors: nothing to prune by, a number below 1, an age that is none, a run named twice.
    """
    problems = list(_problems(request))
    if problems:
        raise InputErrors(problems)
    requested = request.policies_every is not None or request.policies_last is not None
    return PruneRules(
        every=request.policies_every,
        last=(request.policies_last or POLICIES_LAST) if requested else None,
        images=_age(request.images_older_than),
        evaluations=request.evaluations,
        set_aside=_age(request.set_aside_older_than),
    )


def _problems(request: PruneRequest) -> Iterator[InputError]:
    numbers = (("--policies-every", request.policies_every), ("--policies-last", request.policies_last))
    ages = (
        ("--images-older-than", request.images_older_than),
        ("--set-aside-older-than", request.set_aside_older_than),
    )
    if all(value is None for _, value in (*numbers, *ages)):
        hint = (
            "Say what may go: --policies-every N, --policies-last K, --images-older-than AGE or "
            "--set-aside-older-than AGE; --dry-run then shows what that would remove."
        )
        yield InputError("grpo prune", "no rule", hint)
    for option, number in numbers:
        if number is not None and number < 1:
            yield InputError(option, number, "Give 1 or more; the last version always stays.")
    for option, text in ages:
        if text is None:
            continue
        age = _age(text)
        if age is None:
            hint = "Write days or hours, as 30d or 12h"
            back = "; or iterations back from the last, as 20i" if option.startswith("--images") else ""
            yield InputError(option, text, f"{hint}{back}.")
        elif age.time is None and option.startswith("--set-aside"):
            yield InputError(option, text, "What was set aside belongs to no iteration; write days or hours, as 30d.")
    if request.evaluations and request.images_older_than is None:
        yield InputError("--evaluations", True, "Say how old their images must be with --images-older-than.")
    if len(set(request.sources)) < len(request.sources):
        yield InputError("RUN", list(request.sources), "A run stands twice; name each once.")


def _age(text: str | None) -> Age | None:
    found = _AGE.fullmatch(text.strip()) if text is not None else None
    if found is None or text is None:
        return None
    number, unit = int(found[1]), found[2]
    if unit == "i":
        return Age(text.strip(), None, number)
    return Age(text.strip(), timedelta(days=number) if unit == "d" else timedelta(hours=number), None)
