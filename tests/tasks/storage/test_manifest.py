"""A manifest comes back as it was written, or not at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.storage.manifest import opened, sealed

DESCRIBED = {"schema_version": 2, "rows": 4, "seconds": 0.1, "metrics": {"loss": 1e-9}, "files": {"a": "b"}}


def test_what_was_sealed_is_opened() -> None:
    assert opened(sealed(DESCRIBED)) == DESCRIBED


@given(st.integers(0, len(sealed(DESCRIBED)) * 8 - 1))
def test_a_flipped_bit_breaks_the_seal(bit: int) -> None:
    changed = bytearray(sealed(DESCRIBED))
    changed[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(ValueError, match=r"not as it was written|JSON|Expecting|decode|control|delimiter"):
        opened(bytes(changed))


def test_a_manifest_without_a_seal_is_of_the_first_schema_or_none() -> None:
    first = {**DESCRIBED, "schema_version": 1}
    assert opened(json.dumps(first).encode()) == first
    with pytest.raises(ValueError, match="not as it was written"):
        opened(json.dumps(DESCRIBED).encode())
