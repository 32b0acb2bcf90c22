from pathlib import Path

import pytest

from tasks.reports import artifact_reader
from tasks.reports.artifact_reader import ArtifactReader, Damage
from tasks.storage.manifest import opened, sealed
from tests.tasks.reports.made_runs import RunMaker, contents, flip_last_byte


@pytest.fixture
def maker(tmp_path: Path) -> RunMaker:
    maker = RunMaker(tmp_path)
    maker.rewards("iteration_000001", "i000001")
    return maker


def test_finds_and_verifies_what_the_store_committed(maker: RunMaker) -> None:
    reader = ArtifactReader(maker.store)
    found = reader.find("iteration_000001/rewards")
    assert found is not None
    assert found.reference == maker.store.find("iteration_000001/rewards")
    assert reader.verify(found)
    assert reader.damages == []
    assert reader.find("iteration_000002/rewards") is None


def test_a_flipped_byte_is_told_and_left_where_it_is(maker: RunMaker) -> None:
    flip_last_byte(maker.folder / "iteration_000001/rewards/ssim.parquet")
    before = contents(maker.folder)
    reader = ArtifactReader(maker.store)
    found = reader.find("iteration_000001/rewards")
    assert found is not None
    assert not reader.verify(found)
    assert not reader.verify_within_budget(found)
    (damage,) = reader.damages
    assert damage.place == "iteration_000001/rewards/ssim.parquet"
    assert found.files["ssim.parquet"][:12] in damage.reason
    assert contents(maker.folder) == before


def test_a_missing_file_is_told(maker: RunMaker) -> None:
    (maker.folder / "iteration_000001/rewards/ssim.parquet").unlink()
    reader = ArtifactReader(maker.store)
    assert reader.find("iteration_000001/rewards") is None
    assert reader.damages == [Damage("iteration_000001/rewards/ssim.parquet", "it is missing")]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"files": {}}', b'{"files": 3}', b"\xff\xfe", b'{"digest": "x"'])
def test_what_is_no_manifest_is_told(maker: RunMaker, content: bytes) -> None:
    (maker.folder / "iteration_000001/rewards.manifest.json").write_bytes(content)
    reader = ArtifactReader(maker.store)
    assert reader.find("iteration_000001/rewards") is None
    assert [damage.place for damage in reader.damages] == ["iteration_000001/rewards.manifest.json"]


def test_another_schema_version_is_told(maker: RunMaker) -> None:
    manifest = maker.folder / "iteration_000001/rewards.manifest.json"
    manifest.write_bytes(sealed(opened(manifest.read_bytes()) | {"schema_version": 99}))
    reader = ArtifactReader(maker.store)
    assert reader.find("iteration_000001/rewards") is None
    assert "99" in reader.damages[0].reason


def test_beyond_the_budget_nothing_is_read_but_counted(maker: RunMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_last_byte(maker.folder / "iteration_000001/rewards/ssim.parquet")
    monkeypatch.setattr(artifact_reader, "VERIFIED_BYTES", 10)
    reader = ArtifactReader(maker.store)
    found = reader.find("iteration_000001/rewards")
    assert found is not None
    assert reader.verify_within_budget(found)
    assert reader.unverified == 1
    assert not reader.verify(found)
