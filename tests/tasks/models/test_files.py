"""A model's digest: changed by every file that the loader may read."""

from pathlib import Path

import pytest

from tasks.models.files import model_digest


@pytest.mark.parametrize("name", ["transformer/model.safetensors", "transformer/pytorch_model.bin", "vae/config.json"])
def test_every_file_that_may_be_loaded_counts(tmp_path: Path, name: str) -> None:
    digests = []
    for content in (b"one", b"two"):
        folder = tmp_path / content.decode()
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(content)
        digests.append(model_digest(str(folder)))
    assert digests[0] != digests[1]


def test_what_is_only_read_by_people_does_not(tmp_path: Path) -> None:
    digests = []
    for content in ("one", "two"):
        folder = tmp_path / content
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "README.md").write_text(content)
        digests.append(model_digest(str(folder)))
    assert digests[0] == digests[1]
