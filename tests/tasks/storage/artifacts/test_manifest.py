"""A manifest comes back as it was written, or not at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.storage.artifacts.manifest import read_manifest, written
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.filesystem.checked_json import dump_checked, load_checked

DESCRIBED = {"schema_version": 2, "rows": 4, "seconds": 0.1, "metrics": {"loss": 1e-9}, "files": {"a": "b"}}


def test_what_was_sealed_is_opened() -> None:
    assert load_checked(dump_checked(DESCRIBED)) == DESCRIBED


@given(st.integers(0, len(dump_checked(DESCRIBED)) * 8 - 1))
def test_a_flipped_bit_breaks_the_seal(bit: int) -> None:
    changed = bytearray(dump_checked(DESCRIBED))
    changed[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(ValueError, match=r"not as it was written|JSON|Expecting|decode|control|delimiter"):
        load_checked(bytes(changed))


def test_a_manifest_without_a_seal_is_refused() -> None:
    with pytest.raises(ValueError, match="not as it was written"):
        load_checked(json.dumps(DESCRIBED).encode())


OUTSIDE = ["../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "", ".", "..", "a\\..\\b", "a\0b", "a\nb", "a/"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="which is not in its folder"):
        read_manifest(dump_checked({**DESCRIBED, "files": {name: "b"}}))
    with pytest.raises(ValueError, match="which is not in its folder"):
        read_manifest(dump_checked({**DESCRIBED, "leaving": {name: "b"}}))
    with pytest.raises(ValidationError, match="below the storage root"):
        ArtifactRef(uri=f"run/{name}", sha256="a", digest="d", schema_version=1, rows=1, seconds=0.0, metrics={})


@pytest.mark.parametrize("name", ["part-00000.parquet", "a/b..c", "...", "ein Maß/数.png"])
def test_other_names_are_taken_as_they_are(name: str) -> None:
    assert read_manifest(dump_checked({**DESCRIBED, "files": {name: "b"}})).files == {name: "b"}


@pytest.mark.parametrize("entry", [{"files": ["a"]}, {"files": {"a": 1}}, {"previous": "a"}, {"pruned": "a"}])
def test_entries_of_another_kind_are_refused(entry: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="manifest"):
        read_manifest(dump_checked({**DESCRIBED, **entry}))


def test_what_was_written_is_read() -> None:
    first = written({"digest": "d"}, {"a": "b"})
    second = written({"digest": "d"}, {"a": "c"}).succeeding(first, pruned={"why": "age"}, leaving={"a": "b"})
    third = written({"digest": "d"}, {"a": "c"}).succeeding(second)
    assert [read_manifest(each.content) for each in (first, second, third)] == [first, second, third]
    assert third.previous == (second.sha256, first.sha256)
    assert second.accepted("a") == {"b", "c"}
    assert third.accepted("a") == {"c"}
