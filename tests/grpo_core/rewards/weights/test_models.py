import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import safetensors.torch
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from grpo_core.errors import InputError
from grpo_core.rewards.weights.models import ModelSource
from tests.grpo_core.rewards.conftest import COMMIT, put_into, save_changed

PLACE = "rewards.text_model.model"
CONFIG = BertConfig(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=1
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForSequenceClassification(CONFIG).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may break."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def as_pickle(folder: Path, content: object) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


def load(source: str) -> torch.nn.Module:
    return ModelSource(PLACE, source).load(AutoModelForSequenceClassification)


def test_model_is_loaded_frozen_in_full_precision(saved: Path, folder: Path) -> None:
    file = "model.safetensors"
    tensors = safetensors.torch.load_file(saved / file)
    save_changed(saved / file, folder / file, dict.fromkeys(tensors, torch.Tensor.half))
    model = load(str(folder))
    assert torch.equal(model.state_dict()["classifier.weight"], tensors["classifier.weight"].half().float())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_missing_models_are_refused(cache: Path, tmp_path: Path) -> None:
    cases = (
        *((source, "Set a folder") for source in (None, "")),
        *((source, "There is no such folder") for source in (str(tmp_path / "nowhere"), "./nowhere")),
        *((source, "neither a folder nor a name") for source in ("nowhere", "a/b/c")),
        *((source, "not in the local cache") for source in ("makers/net", "makers/net@v2")),
        (str(tmp_path), "has no config.json"),
    )
    for source, word in cases:
        with pytest.raises(InputError, match=word) as caught:
            ModelSource(PLACE, source).path()
        assert (caught.value.place, caught.value.value) == (PLACE, source)


def test_incomplete_models_are_refused(cache: Path, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    parts = {part: f"model-0000{part}-of-00002.safetensors" for part in "12"}
    index.write_text(json.dumps({"weight_map": parts}))
    with pytest.raises(InputError, match="model-00002-of-00002"):
        ModelSource(PLACE, str(folder)).path()
    index.unlink()
    (folder / parts["1"]).unlink()
    with pytest.raises(InputError, match=r"model\.safetensors"):
        ModelSource(PLACE, str(folder)).path()
    # An interrupted download.
    put_into(cache, "makers/net", contents(folder))
    with pytest.raises(InputError, match="not in the local cache"):
        ModelSource(PLACE, "makers/net").path()


def test_online_a_model_of_the_hub_is_no_problem(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert ModelSource(PLACE, "makers/net").find_problem() is None


def test_digest_is_of_the_content_in_any_place(cache: Path, folder: Path) -> None:
    digest = ModelSource(PLACE, str(folder)).digest()
    snapshot = put_into(cache, "makers/net", contents(folder))
    assert Path(ModelSource(PLACE, "makers/net").path()) == snapshot
    assert ModelSource(PLACE, "makers/net").digest() == ModelSource(PLACE, f"makers/net@{COMMIT}").digest() == digest
    for unrelated in ("README.md", "pytorch_model.bin", ".gitattributes"):
        (folder / unrelated).write_bytes(b"...")
    assert ModelSource(PLACE, str(folder)).digest() == digest
    assert torch.equal(load("makers/net").classifier.weight, load(str(folder)).classifier.weight)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert ModelSource(PLACE, str(folder)).digest() != digest


def test_a_configured_digest_is_checked(folder: Path) -> None:
    digest = ModelSource(PLACE, str(folder)).digest()
    assert ModelSource(PLACE, str(folder), digest[:8].upper()).find_problem() is None
    with pytest.raises(InputError, match=rf"model_sha256: got '0{{8}}'.*{digest}"):
        ModelSource(PLACE, str(folder), "0" * 8).path()


@pytest.mark.parametrize("pickled", [False, True])
def test_download_takes_pickles_only_where_there_is_nothing_else(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, pickled: bool
) -> None:
    requested: list[list[str]] = []

    def snapshot_download(repo: str, revision: str | None, **patterns: list[str]) -> str:
        requested.append(list(filter_repo_objects(listed, **patterns)))
        return str(put_into(cache, repo, contents(folder)))

    listed = [
        "README.md",
        "config.json",
        "pytorch_model.bin",
        "training_args.bin",
        "onnx/model.onnx",
        "sub/config.json",
    ]
    if pickled:
        as_pickle(folder, {"a": torch.zeros(1)})
    else:
        listed.append("model.safetensors")
    api = SimpleNamespace(list_repo_files=lambda repo, revision: listed)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert ModelSource(PLACE, "makers/net").path() == ModelSource(PLACE, "makers/net").path()
    assert requested == [["config.json", "pytorch_model.bin" if pickled else "model.safetensors"]]


def test_pickled_weights_are_read_without_their_code(folder: Path, tmp_path: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    as_pickle(folder, tensors)
    assert torch.equal(load(str(folder)).state_dict()["classifier.weight"], tensors["classifier.weight"])
    trace = tmp_path / "trace"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (trace,)  # type: ignore[return-value]

    torch.save({**tensors, "evil": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be loaded as AutoModelForSequenceClassification"):
        load(str(folder))
    assert not trace.exists()


def test_files_of_another_or_a_broken_model_are_refused(saved: Path, folder: Path) -> None:
    file, config = "model.safetensors", "config.json"
    content = (saved / file).read_bytes()
    broken = [(file, content[:-100]), (file, b""), (config, b"{"), (config, b'{"model_type": "clip_text_model"}')]
    for name, damaged in broken:
        (folder / name).write_bytes(damaged)
        with pytest.raises(InputError, match=rf"{PLACE}: got .*cannot be loaded"):
            load(str(folder))
        (folder / name).write_bytes((saved / name).read_bytes())
    for changed in (None, torch.zeros(3, 8)):
        save_changed(saved / file, folder / file, {"classifier.weight": changed})
        with pytest.raises(InputError, match=rf"{PLACE}: got "):
            load(str(folder))


def test_a_missing_or_broken_tokenizer_is_refused(folder: Path) -> None:
    for content in (None, '{"version": '):
        if content:
            (folder / "tokenizer.json").write_text(content)
        with pytest.raises(InputError, match=rf"{PLACE}: got .*tokenizer"):
            ModelSource(PLACE, str(folder)).load_tokenizer()
