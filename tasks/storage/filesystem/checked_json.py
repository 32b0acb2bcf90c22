"""Small JSON documents that carry their own checksum."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"


def dump_checked(described: Mapping[str, Any]) -> bytes:
    """Encode a record as JSON with a `checksum`: the sha256 of everything else.

    Args:
        described: names and JSON values; no number may be infinite or NaN.

    Raises:
        ValueError: a number is not finite.
    """
    return _text({**described, CHECKSUM: _digest(described)})


def load_checked(content: bytes) -> dict[str, Any]:
    """Decode what `dump_checked` encoded.

    Raises:
        ValueError: it is no such record, or was changed.
    """
    described = json.loads(content)
    if not isinstance(described, dict) or described.pop(CHECKSUM, None) != _digest(described):
        raise ValueError("it does not match its checksum")
    return described


def _text(described: Mapping[str, Any]) -> bytes:
    return json.dumps(described, indent=1, sort_keys=True, allow_nan=False).encode()


def _digest(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(described)).hexdigest()
