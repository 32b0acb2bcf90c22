"""The steps of a write that is complete or absent."""

import os
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from grpo_core.errors import InputError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import fsync_folder, matching, move_folder, remove_folder, temporary_folder


@pytest.mark.parametrize(("mask", "rights"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_published_files_have_the_rights_that_the_person_gives(tmp_path: Path, mask: int, rights: int) -> None:
    previous = os.umask(mask)
    try:
        staged = tmp_path / "staged"
        (staged / "inner").mkdir(parents=True)
        save_file({"a": torch.zeros(2)}, staged / "weights.safetensors")
        (staged / "inner" / "state.json").write_text("{}")
        fsync_folder(staged)
        move_folder(staged, tmp_path / "published")
    finally:
        os.umask(previous)
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "published").rglob("*") if path.is_file()}
    assert found == {"weights.safetensors": rights, "state.json": rights}


@pytest.mark.parametrize("protocol", ["file", "memory"])
@pytest.mark.parametrize("name", ["a[bc]", "a*", "a?", "[!x]b", "**", "a{b,c}", "plain"])
def test_no_character_of_a_folder_is_a_pattern(tmp_path: Path, protocol: str, name: str) -> None:
    filesystem, top = fsspec.filesystem(protocol, auto_mkdir=True), f"{tmp_path}/{protocol}"
    files = ("1/lock", "1/other", "2/lock", "21/deep/lock", "lock")
    for folder in (name, "ab", "ac"):
        for file in files:
            filesystem.pipe_file(f"{top}/{folder}/{file}", b"x")
    own = f"{top}/{name}"
    try:
        assert matching(filesystem, own, "*/lock") == [f"{own}/1/lock", f"{own}/2/lock"]
        assert matching(filesystem, own, "2*") == [f"{own}/2", f"{own}/21"]
        assert matching(filesystem, own, "[12]/o?her") == [f"{own}/1/other"]
        assert matching(filesystem, own, "lock/*") == matching(filesystem, f"{own}/none", "*") == []
        remove_folder(filesystem, f"{own}/none")
        remove_folder(filesystem, own)
        assert sorted(filesystem.find(top)) == [f"{top}/{folder}/{file}" for folder in ("ab", "ac") for file in files]
    finally:
        filesystem.rm(top, recursive=True)


class TestTemporaryFolder:
    """Where artifacts for a bucket are written first."""

    @pytest.fixture
    def temporary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        return tmp_path

    def test_it_is_the_users_alone(self, temporary: Path) -> None:
        folder = temporary_folder()
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        assert temporary_folder() == folder

    @pytest.mark.parametrize("other", ["a link", "a dangling link", "a file", "writable for others", "another user's"])
    def test_what_somebody_else_may_have_put_there_is_refused(self, temporary: Path, other: str) -> None:
        place, elsewhere = temporary / f"grpo-{os.geteuid()}", temporary / "elsewhere"
        if other == "a link":
            elsewhere.mkdir()
        if "link" in other:
            place.symlink_to(elsewhere)
        elif other == "a file":
            place.touch()
        else:
            place.mkdir(mode=0o700)
        if other == "writable for others":
            place.chmod(0o777)
        if other == "another user's":
            if os.geteuid() != 0:
                pytest.skip("only root can make another user's folder; run the tests as root")
            os.chown(place, 12345, 12345)
        store = ArtifactStore("memory://staged", "run")
        for ask in (store.clear_abandoned, lambda: store.staging().__enter__()):
            with pytest.raises(InputError) as caught:
                ask()
            assert caught.value.place == "TMPDIR"
