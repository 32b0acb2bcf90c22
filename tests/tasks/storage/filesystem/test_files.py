"""The steps that make a write whole."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.storage.filesystem.files import move_folder, settle_folder


@pytest.mark.parametrize(("mask", "rights"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_published_files_have_the_rights_that_the_person_gives(tmp_path: Path, mask: int, rights: int) -> None:
    previous = os.umask(mask)
    try:
        staged = tmp_path / "staged"
        (staged / "inner").mkdir(parents=True)
        save_file({"a": torch.zeros(2)}, staged / "weights.safetensors")
        (staged / "inner" / "state.json").write_text("{}")
        settle_folder(staged)
        move_folder(staged, tmp_path / "published")
    finally:
        os.umask(previous)
    found = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "published").rglob("*") if path.is_file()}
    assert found == {"weights.safetensors": rights, "state.json": rights}
