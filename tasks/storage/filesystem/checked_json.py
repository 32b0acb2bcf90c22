"""Small JSON documents that carry their own checksum."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SEAL = "seal"


def dump_checked(described: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest, or of another small record; `seal` is the sha256 of all the rest.

    References say which manifest they mean, but whoever looks a folder up has nothing else to hold it against.
    """
    return _text({**described, SEAL: _digest(described)})


def load_checked(content: bytes) -> dict[str, Any]:
    """What `dump_checked` was given.

    Raises:
        ValueError: it is no such record, or not as it was written.
    """
    described = json.loads(content)
    if not isinstance(described, dict) or described.pop(SEAL, None) != _digest(described):
        raise ValueError("it is not as it was written")
    return described


def _text(described: Mapping[str, Any]) -> bytes:
    return json.dumps(described, indent=1, sort_keys=True, allow_nan=False).encode()


def _digest(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(described)).hexdigest()
