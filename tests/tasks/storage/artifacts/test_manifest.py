"""A manifest is read as it was written, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.storage.artifacts.reference import ArtifactRef, Manifest, read_manifest
from tasks.storage.filesystem.files import dump_checked, load_checked

DESCRIBED = {"schema_version": 2, "rows": 4, "seconds": 0.1, "metrics": {"loss": 1e-9}, "files": {"a": "b"}}


@given(st.integers(0, len(dump_checked(DESCRIBED)) * 8 - 1))
def test_a_flipped_bit_breaks_the_checksum(bit: int) -> None:
    assert load_checked(dump_checked(DESCRIBED)) == DESCRIBED
    changed = bytearray(dump_checked(DESCRIBED))
    changed[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(ValueError, match=r"checksum|JSON|Expecting|decode|control|delimiter"):
        load_checked(bytes(changed))


OUTSIDE = ["../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "", ".", "..", "a\\..\\b", "a\0b", "a\nb", "a/"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    for entry in ("files", "deleted"):
        with pytest.raises(ValueError, match="which is not in its folder"):
            read_manifest(dump_checked({**DESCRIBED, entry: {name: "b"}}))
    with pytest.raises(ValidationError, match="below the storage root"):
        ArtifactRef(uri=f"run/{name}", sha256="a", digest="d", schema_version=1, rows=1, seconds=0.0, metrics={})


@pytest.mark.parametrize("name", ["part-00000.parquet", "a/b..c", "...", "ein Maß/数.png"])
def test_other_names_are_accepted(name: str) -> None:
    assert read_manifest(dump_checked({**DESCRIBED, "files": {name: "b"}})).files == {name: "b"}


@pytest.mark.parametrize("entry", [{"files": ["a"]}, {"files": {"a": 1}}, {"deleted": "a"}, {"pruned": "a"}])
def test_entries_of_the_wrong_kind_are_refused(entry: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="manifest"):
        read_manifest(dump_checked({**DESCRIBED, **entry}))


def test_written_manifests_are_read_back() -> None:
    first = Manifest({"digest": "d"}, {"a": "b", "gone": "d"})
    second = Manifest({"digest": "d"}, {"a": "b"}, {"why": "age"}, {"gone": "d"})
    assert [read_manifest(each.content) for each in (first, second)] == [first, second]
    assert first.content != second.content
    # References mean both.
    assert first.sha256 == second.sha256
