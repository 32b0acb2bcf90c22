"""A model's digest: changed by every file that the loader may read."""

from pathlib import Path

import pytest

from tasks.models.files import model_digest

LOADED = ("transformer/model.safetensors", "transformer/pytorch_model.bin", "vae/config.json")


@pytest.mark.parametrize(("name", "counts"), [*((name, True) for name in LOADED), ("README.md", False)])
def test_files_that_may_be_loaded_count_and_others_do_not(tmp_path: Path, name: str, counts: bool) -> None:
    digests = []
    for content in ("one", "two"):
        file = tmp_path / content / name
        file.parent.mkdir(parents=True)
        (tmp_path / content / "config.json").write_text("{}")
        file.write_text(content)
        digests.append(model_digest(str(tmp_path / content)))
    assert (digests[0] != digests[1]) is counts
