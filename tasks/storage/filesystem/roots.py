"""The root of all runs: a folder, or any URL that fsspec reads."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

from grpo_core.errors import InputError
from tasks.storage.filesystem.failures import CREDENTIALS

_S3 = ("s3://", "s3a://")
_EXTRAS = {"s3": "s3fs, which the extra s3 of this package brings", "s3a": "s3fs, which the extra s3 brings"}
# user:password@ or, in a bucket's URL, anything before an @. A key may contain a slash; a port is no password.
_SECRET = re.compile(
    r"(?<=://)[^/@:]*:(?!\d+(?:/|$)).*@|(?<=s3://)(?!arn:)[^/:]*:.*@|(?<=s3a://)(?!arn:)[^/:]*:.*@"
    r"|(?<=s3://)[^/]*@|(?<=s3a://)[^/]*@"
)
LOOK = {"connect_timeout": 4, "read_timeout": 6}
"""Timeout in seconds of the check before a run begins."""
# A bucket that does not answer is reported within about a minute; the stage is then retried by placement.retries.
_ATTEMPTS = {"mode": "standard", "total_max_attempts": 3}


def open_root(root: str) -> tuple[AbstractFileSystem, str]:
    """Open the filesystem of a root, a folder or a URL, and return it with the path in it.

    Raises:
        InputError: credentials in the URL, a URL of an unknown kind, of one whose package is not installed, or within
            a file that is not there.
    """
    if "://" in root and _SECRET.search(root):
        hint = f"A URL is stored with the run and shown to people. {CREDENTIALS}; leave them out of the URL."
        raise InputError("storage.root", _SECRET.sub("***@", root), hint)
    place = root if "://" in root else str(Path(root).expanduser())
    try:
        options = _s3_options({"retries": _ATTEMPTS}) if root.startswith(_S3) else {}
        filesystem, path = fsspec.core.url_to_fs(place, **options)
    except ImportError as error:
        package = _EXTRAS.get(root.partition("://")[0])
        hint = f"Install {package}." if package else f"{error}. Install what reads such URLs."
        raise InputError("storage.root", root, hint) from error
    except (OSError, ValueError) as error:
        hint = f"{error}. Give a folder or a URL of a known kind, such as s3://, and install what reads it."
        raise InputError("storage.root", root, hint) from error
    return filesystem, path.rstrip("/")


def probe_filesystem(root: str) -> AbstractFileSystem:
    """Open the filesystem with short timeouts, for the check before a run begins."""
    if not root.startswith(_S3):
        return open_root(root)[0]
    config = {**LOOK, "retries": {"mode": "standard", "total_max_attempts": 2}}
    filesystem: AbstractFileSystem = fsspec.filesystem("s3", skip_instance_cache=True, **_s3_options(config))
    filesystem.retries = 1
    return filesystem


def _s3_options(config: dict[str, Any]) -> dict[str, Any]:
    # Other machines write here too, so listings must not be cached.
    return {"use_listings_cache": False, "config_kwargs": config, "session": _s3_session()}


@lru_cache(maxsize=1)
def _s3_session() -> Any:
    """Make a session whose uploads send no Expect header: aiohttp would wait without end for the answer to it."""
    from aiobotocore.session import AioSession  # type: ignore[import-untyped]
    from botocore.handlers import add_expect_header  # type: ignore[import-untyped]

    session = AioSession()
    session.unregister("before-call.s3", add_expect_header)
    return session
