"""Secrets in addresses: a user's password or a token in a URL, which would be stored with a run and shown to people."""

import re

from grpo_core.errors import InputError

_SECRETS = re.compile(
    # user:password@, with a slash in it too, while a port is no password; a name alone only where it is a token.
    r"(?<=://)[^/@:\s]*:(?!\d+(?:/|$))\S*@|(?<=http://)[^/@\s]*@|(?<=https://)[^/@\s]*@"
    # In a bucket's URL, anything before an @.
    r"|(?<=s3://)(?!arn:)[^/:\s]*:\S*@|(?<=s3a://)(?!arn:)[^/:\s]*:\S*@|(?<=s3://)[^/\s]*@|(?<=s3a://)[^/\s]*@"
)
_SIGNED = re.compile(
    r"(?<=[?&])([\w.-]*(?:token|secret|password|passwd|signature|credential|api[_-]?key)|sig)=[^&#\s]+", re.IGNORECASE
)
HINT = (
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
        raise InputError(place, shown, f"{HINT}.")
