"""Checks of a reward's settings; each failure is one message with the place, the value and the hint."""

import math
from collections.abc import Sequence

from grpo_core.errors import InputError


def check_choice(place: str, value: object, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of `choices`.

    Raises:
        InputError: it is not.
    """
    if value not in choices:
        raise InputError(place, value, f"Set one of {', '.join(choices)}.")


def check_integer(place: str, value: object, low: int, high: int) -> None:
    """Refuse what is not an integer in [low, high]; True and False are no integers here.

    Raises:
        InputError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InputError(place, value, f"Set a whole number from {low} to {high}.")


def check_positive(place: str, value: object, unit: str) -> None:
    """Refuse what is not a finite number above zero; True and False are no numbers here.

    Raises:
        InputError: it is not.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise InputError(place, value, f"Set a number of {unit} above 0.")
