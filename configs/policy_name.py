"""How people name a policy version, the same in every command: RUN, RUN@N or RUN@best."""

import re
from dataclasses import dataclass

BEST = "best"
"""In place of a number: the policy version with the highest held-out reward."""

FORM = "RUN[@N|@best]"

_NAMED = re.compile(rf"(.+)@([0-9]{{1,9}}|{BEST})")


@dataclass(frozen=True)
class PolicyName:
    """A run, by name or path, and a version of its policy: a number as text, `best`, or None where none is named."""

    run: str
    version: str | None

    @classmethod
    def parse(cls, text: str) -> "PolicyName":
        """Read what a person wrote; what follows an @ and is no version belongs to the run."""
        found = _NAMED.fullmatch(text)
        return cls(found[1], found[2]) if found else cls(text, None)
