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

PLACE = "rewards.text_model.model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
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
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, and no way to ask it."""
    hub = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return hub


def put_into(cache: Path, repo: str, folder: Path) -> Path:
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    return snapshot


def as_pickle(folder: Path, content: object) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


def load(source: str) -> torch.nn.Module:
    return ModelSource(PLACE, source).load(AutoModelForSequenceClassification)


def test_model_is_loaded_frozen_in_full_precision(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    half = {name: tensor.half() for name, tensor in tensors.items()}
    safetensors.torch.save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(str(folder))
    found = model.state_dict()
    assert torch.equal(found["classifier.weight"], tensors["classifier.weight"].half().float())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_missing_models_are_told(cache: Path, tmp_path: Path) -> None:
    cases = (
        (None, "Set a folder .* owner/repo"),
        ("", "Set a folder"),
        (str(tmp_path / "nowhere"), "There is no such folder"),
        ("./nowhere", "There is no such folder"),
        ("nowhere", "neither a folder nor a name"),
        ("a/b/c", "neither a folder nor a name"),
        ("makers/net", "not in the local cache"),
        ("makers/net@v2", "not in the local cache"),
        (str(tmp_path), "has no config.json"),
    )
    for source, told in cases:
        with pytest.raises(InputError, match=told) as caught:
            ModelSource(PLACE, source).folder()
        assert (caught.value.place, caught.value.value) == (PLACE, source)


def test_incomplete_models_are_told(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    )
    problem = ModelSource(PLACE, str(folder)).find_problem()
    assert problem is not None
    assert "does not contain model-00002-of-00002.safetensors" in problem.hint
    index.unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    problem = ModelSource(PLACE, str(folder)).find_problem()
    assert problem is not None
    assert "does not contain model.safetensors" in problem.hint


def test_online_a_model_of_the_hub_is_no_problem(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert ModelSource(PLACE, "makers/net").find_problem() is None


def test_digest_is_of_the_content_wherever_it_lies(cache: Path, folder: Path) -> None:
    digest = ModelSource(PLACE, str(folder)).digest()
    snapshot = put_into(cache, "makers/net", folder)
    assert ModelSource(PLACE, "makers/net").folder() == snapshot
    assert ModelSource(PLACE, "makers/net").digest() == ModelSource(PLACE, f"makers/net@{COMMIT}").digest() == digest
    for beside in ("README.md", "pytorch_model.bin", ".gitattributes"):
        (folder / beside).write_bytes(b"...")
    assert ModelSource(PLACE, str(folder)).digest() == digest
    assert torch.equal(load("makers/net").classifier.weight, load(str(folder)).classifier.weight)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert ModelSource(PLACE, str(folder)).digest() != digest


def test_digest_that_is_asked_for_is_checked(folder: Path) -> None:
    digest = ModelSource(PLACE, str(folder)).digest()
    assert ModelSource(PLACE, str(folder), digest[:8].upper()).find_problem() is None
    with pytest.raises(InputError, match=rf"model_sha256: got '0{{8}}'.*{digest}"):
        ModelSource(PLACE, str(folder), "0" * 8).folder()


def test_interrupted_download_counts_as_not_there(cache: Path, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    put_into(cache, "makers/net", folder)
    problem = ModelSource(PLACE, "makers/net").find_problem()
    assert problem is not None
    assert "not in the local cache" in problem.hint


@pytest.mark.parametrize("pickled", [False, True])
def test_download_takes_pickles_only_where_there_is_nothing_else(
    cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, pickled: bool
) -> None:
    requested: list[list[str]] = []

    def snapshot_download(
        repo: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        requested.append(
            list(filter_repo_objects(listed, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        )
        return str(put_into(cache, repo, folder))

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
    assert ModelSource(PLACE, "makers/net").folder() == ModelSource(PLACE, "makers/net").folder()
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


def test_files_of_another_or_a_broken_model_are_told(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()

    def message_of() -> str:
        with pytest.raises(InputError, match=rf"{PLACE}: got ") as caught:
            load(str(folder))
        return str(caught.value)

    file.write_bytes(whole[:-100])
    assert "cannot be loaded" in message_of()
    file.write_bytes(b"")
    assert "cannot be loaded" in message_of()
    file.write_bytes(whole)
    tensors = safetensors.torch.load_file(file)
    headless = {name: tensor for name, tensor in tensors.items() if name != "classifier.weight"}
    safetensors.torch.save_file(headless, file, metadata={"format": "pt"})
    assert "lack classifier.weight" in message_of()
    wide = {**tensors, "classifier.weight": torch.zeros(3, 8)}
    safetensors.torch.save_file(wide, file, metadata={"format": "pt"})
    message_of()
    file.write_bytes(whole)
    (folder / "config.json").write_text("{")
    assert "cannot be loaded" in message_of()
    (folder / "config.json").write_text('{"model_type": "clip_text_model"}')
    assert "cannot be loaded" in message_of()


def test_tokenizer_that_is_missing_or_broken_is_told(folder: Path) -> None:
    with pytest.raises(InputError, match="has no tokenizer"):
        ModelSource(PLACE, str(folder)).load_tokenizer()
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(InputError, match="tokenizer cannot be loaded"):
        ModelSource(PLACE, str(folder)).load_tokenizer()
