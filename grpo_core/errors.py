"""Errors with a message for the user: wrong input, a stage that cannot continue, an address that has a secret in it."""

import re
from collections.abc import Iterable, Sequence


class InputError(ValueError):
    """One input or several cannot be used, all reported together; the command line exits with code 2.

    Args:
        place: a configuration key such as ``data.prompts``, or a file and line.
        hint: an instruction that fixes it.
        more: place, value and hint of the other inputs.
    """

    def __init__(self, place: str, value: object, hint: str, more: Sequence[tuple[str, object, str]] = ()) -> None:
        self.place, self.value, self.hint = place, value, hint
        self._more = tuple(InputError(*each) for each in more)
        super().__init__("\n".join([f"{place}: got {_shown(value)}. {hint}", *map(str, self._more)]))

    @property
    def errors(self) -> tuple["InputError", ...]:
        """An error for each input; the first has the place, value and hint of this one."""
        return (InputError(self.place, self.value, self.hint), *self._more) if self._more else (self,)

    def __reduce__(self) -> tuple[type["InputError"], tuple[object, ...]]:
        return type(self), (self.place, self.value, self.hint, [(e.place, e.value, e.hint) for e in self._more])


def _shown(value: object, most: int = 400) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def joined(errors: Iterable[InputError]) -> InputError:
    """Return one error for all of these; there is at least one."""
    first, *more = (each for error in errors for each in error.errors)
    if not more:
        return first
    return InputError(first.place, first.value, first.hint, [(each.place, each.value, each.hint) for each in more])


def raise_all(errors: Iterable[InputError]) -> None:
    """Raise one InputError for all of these, if there are any."""
    if found := tuple(errors):
        raise joined(found)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class NonFiniteError(ArithmeticError):
    """A loss, gradient, reward or log-prob is NaN or infinite; names the samples."""

    def __init__(self, quantity: str, sample_ids: Sequence[str], hint: str) -> None:
        self.quantity, self.sample_ids, self.hint = quantity, tuple(sample_ids), hint
        shown = ", ".join(self.sample_ids[:8]) + (" ..." if len(self.sample_ids) > 8 else "")
        super().__init__(f"{quantity} is not finite for {len(self.sample_ids)} sample(s): {shown}. {hint}")

    def __reduce__(self) -> tuple[type["NonFiniteError"], tuple[str, tuple[str, ...], str]]:
        return type(self), (self.quantity, self.sample_ids, self.hint)


class FailedSamplesError(RuntimeError):
    """A reward failed (`sample: reason`) for a larger share of a stage's samples than the limit, in [0, 1]."""

    def __init__(self, reward: str, failed: Sequence[str], total: int, limit: float) -> None:
        self.reward, self.failed, self.total, self.limit = reward, tuple(failed), total, limit
        shown = "; ".join(self.failed[:3]) + ("; ..." if len(self.failed) > 3 else "")
        super().__init__(
            f"reward {reward}: {len(self.failed)} of {total} samples could not be scored, more than max_failures "
            f"{limit:g} allows ({shown}). Fix the cause and run the same command again: the "
            "rollouts and the scores of the other rewards are kept."
        )

    def __reduce__(self) -> tuple[type["FailedSamplesError"], tuple[str, tuple[str, ...], int, float]]:
        return type(self), (self.reward, self.failed, self.total, self.limit)


_SECRETS = re.compile(
    # user:password@, with a slash in it too, while a port is no password; a name alone only where it is a token.
    r"(?<=://)[^/@:\s]*:(?!\d+(?:/|$))\S*@|(?<=http://)[^/@\s]*@|(?<=https://)[^/@\s]*@"
    # In a bucket's URL, anything before an @.
    r"|(?<=s3://)(?!arn:)[^/:\s]*:\S*@|(?<=s3a://)(?!arn:)[^/:\s]*:\S*@|(?<=s3://)[^/\s]*@|(?<=s3a://)[^/\s]*@"
)
_SIGNED = re.compile(
    r"(?<=[?&])([\w.-]*(?:token|secret|password|passwd|signature|credential|api[_-]?key)|sig)=[^&#\s]+", re.IGNORECASE
)
_ADDRESS_HINT = (
    "An address is stored with the run and shown to people, so it may have no password and no token. Give them where "
    "the address is read: in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile (AWS_PROFILE) for a bucket, in "
    "the variable that `token_env` of a reward names, in fsspec's own configuration for other files; or name a copy "
    "on this machine"
)


def hide_secrets(text: str) -> str:
    """Return a text in which `***` stands for the secrets in its addresses; the text itself if there are none."""
    if "://" not in text:
        return text
    return _SIGNED.sub(r"\1=***", _SECRETS.sub("***@", text))


def refuse_secrets(place: str, address: str) -> None:
    """Refuse an address with a secret; the error shows it without."""
    if (shown := hide_secrets(address)) != address:
        raise InputError(place, shown, f"{_ADDRESS_HINT}.")
