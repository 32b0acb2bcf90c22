"""Where weights are, here, on the Hub and at their makers: they are loaded in full precision, never with their code."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from grpo_core.errors import InputError
from grpo_core.rewards.model_reward import load_model, load_once, load_state_dict, load_tokenizer, load_weights
from grpo_core.rewards.weights import FILE, HubName, Published, Weights
from grpo_core.seeds import file_sha256
from tests.grpo_core.rewards.conftest import put_into, refusal, refused, save_changed
from tests.grpo_core.rewards.stub import (
    COMMIT,
    CONTENT,
    DIGEST,
    NET,
    Stub,
    as_the_hub,
    reach,
)

MINE = "rewards.mine.weights"
CONFIG = BertConfig(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=1
)


def weights_of(path: Path) -> Weights:
    return Weights(MINE, str(path), None, Published("the makers", "net.pth"))


def model_in(folder: Path) -> Weights:
    return Weights(MINE, str(folder), None, Published("the makers"))


def load(folder: Path) -> torch.nn.Module:
    return load_model(model_in(folder), AutoModelForSequenceClassification)


def refuse(path: Path) -> None:
    assert refusal(load_state_dict, weights_of(path)) == (MINE, str(path))


class Evil:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.trace,)


class TestTensors:
    @pytest.mark.parametrize("name", ["t.pt", "legacy.pt", "t.safetensors"])
    def test_truncated_and_garbled_files_are_refused(self, tmp_path: Path, name: str) -> None:
        path, tensors = tmp_path / name, {"a": torch.zeros(30, 5)}
        if name == "t.safetensors":
            safetensors.torch.save_file(tensors, path)
        else:
            torch.save(tensors, path, _use_new_zipfile_serialization=name != "legacy.pt")
        whole, random = path.read_bytes(), np.random.default_rng(0)
        for length in range(0, len(whole) - 200, 97):
            path.write_bytes(whole[:length])
            refuse(path)
        for position in random.integers(0, min(len(whole), 1000), 200):
            garbled = bytearray(whole)
            garbled[position] ^= 0xFF
            path.write_bytes(garbled)
            # A byte that nothing depends on may be read over; every other one ends in a message and nothing else.
            with contextlib.suppress(InputError):
                load_state_dict(weights_of(path))

    def test_code_in_a_file_never_runs(self, tmp_path: Path) -> None:
        trace, path = tmp_path / "trace", tmp_path / "evil.pt"
        torch.save({"a": Evil(trace)}, path)
        refuse(path)
        assert not trace.exists()
        torch.load(path, weights_only=False)
        assert trace.exists()

    @pytest.mark.parametrize(
        ("tensors", "named"),
        [
            ({"weight": torch.zeros(1, 2)}, "bias"),
            ({"weight": torch.zeros(2, 1), "bias": torch.zeros(1)}, "weight has shape [2, 1]"),
            ({"weight": torch.zeros(1, 2), "bias": torch.zeros(1), "c": torch.zeros(1)}, "has c,"),
        ],
    )
    def test_wrong_tensors_are_named(self, tmp_path: Path, tensors: dict[str, torch.Tensor], named: str) -> None:
        error = refused(load_weights, weights_of(tmp_path / "f"), torch.nn.Linear(2, 1), tensors, "a line")
        assert (error.place, error.value) == (MINE, str(tmp_path / "f"))
        assert named in error.hint


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


class TestLoading:
    def test_frozen_and_in_full_precision(self, saved: Path, folder: Path) -> None:
        file = "model.safetensors"
        tensors = safetensors.torch.load_file(saved / file)
        save_changed(saved / file, folder / file, dict.fromkeys(tensors, torch.Tensor.half))
        loaded = load(folder)
        assert torch.equal(loaded.state_dict()["classifier.weight"], tensors["classifier.weight"].half().float())
        assert not loaded.training
        assert not any(parameter.requires_grad for parameter in loaded.parameters())

    def test_pickled_weights_are_read_without_their_code(self, folder: Path, tmp_path: Path) -> None:
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        assert torch.equal(load(folder).state_dict()["classifier.weight"], tensors["classifier.weight"])
        trace = tmp_path / "trace"
        torch.save({**tensors, "evil": Evil(trace)}, folder / "pytorch_model.bin")
        assert refusal(load, folder) == (MINE, str(folder))
        assert not trace.exists()

    def test_files_of_another_or_a_broken_model_are_refused(self, saved: Path, folder: Path) -> None:
        file, config = "model.safetensors", "config.json"
        content = (saved / file).read_bytes()
        broken = [(file, content[:-100]), (file, b""), (config, b"{"), (config, b'{"model_type": "clip_text_model"}')]
        for name, damaged in broken:
            (folder / name).write_bytes(damaged)
            assert refusal(load, folder) == (MINE, str(folder))
            (folder / name).write_bytes((saved / name).read_bytes())
        for changed in (None, torch.zeros(3, 8)):
            save_changed(saved / file, folder / file, {"classifier.weight": changed})
            assert refusal(load, folder) == (MINE, str(folder))

    def test_a_missing_or_broken_tokenizer_is_refused(self, folder: Path) -> None:
        for content in (None, '{"version": '):
            if content:
                (folder / "tokenizer.json").write_text(content)
            assert refusal(load_tokenizer, model_in(folder)) == (MINE, str(folder))


PLACE = "rewards.lpips.weights"
MODEL_PLACE = "rewards.text_model.model"
MODEL = {"config.json": b"{}", "model.safetensors": b"tensors", "tokenizer.json": b"{}"}


def weights(source: str | None, sha256: str | None = None, published: Published = NET) -> Weights:
    return Weights(PLACE, source, sha256, published)


def model(source: str | None, sha256: str | None = None) -> Weights:
    return Weights(MODEL_PLACE, source, sha256, Published("its makers", note="for example makers/net"))


@pytest.fixture
def hub(stub: Stub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    stub.respond = as_the_hub
    reach(stub, monkeypatch)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    yield stub
    huggingface_hub.close_session()


def gets(stub: Stub) -> list[str]:
    return [each.path for each in stub.requested if each.method == "GET" and "/resolve/" in each.path]


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "right"),
        [
            ("hf://o/r/f.pth", ("o/r", "f.pth", None)),
            ("hf://o/r/a/b+c.pth@v1.0", ("o/r", "a/b+c.pth", "v1.0")),
            ("hf://o/r/f.pth@refs/pr/3", ("o/r", "f.pth", "refs/pr/3")),
            ("hf://o/r@main/a/f.pth", ("o/r", "a/f.pth", "main")),
        ],
    )
    def test_names_on_the_hub_are_taken_apart(self, name: str, right: tuple[str, str, str | None]) -> None:
        assert HubName.read(name, FILE) == HubName(*right)

    def test_offline_the_cache_is_all_there_is(self, cache: Path) -> None:
        source = "hf://makers/net/sub/net.pth"
        error = refused(weights(source).path)
        assert (error.place, error.value) == (PLACE, source)
        assert str(weights(source).problem()) == str(error)

        snapshot = put_into(cache, "makers/net", {"sub/net.pth": CONTENT})
        assert weights(source, DIGEST[:10].upper()).problem() is None
        found = weights(source, DIGEST)
        assert (Path(found.path()), found.digest()) == (snapshot / "sub/net.pth", DIGEST)
        assert weights(f"{source}@v2").problem() is not None
        assert weights(f"{source}@{COMMIT}").problem() is None

    def test_digests_are_checked_by_setting_and_by_published_name(self, cache: Path, tmp_path: Path) -> None:
        put_into(cache, "makers/net", {NET.file: CONTENT})
        stated = Published("them", "a+b.pth", "https://example.org", sha256=DIGEST[:16])
        right, wrong = tmp_path / "a+b.pth", tmp_path / "wrong" / "a+b.pth"
        wrong.parent.mkdir()
        right.write_bytes(CONTENT)
        wrong.write_bytes(CONTENT + b"!")
        assert weights(str(right), None, stated).problem() is None
        for source, digest, published, value in (
            (NET.hub, "0" * 8, NET, "00000000"),
            (NET.hub, None, NET, "7be5be79"),
            (str(wrong), None, stated, DIGEST[:16]),
        ):
            problem = weights(source, digest, published).problem()
            assert problem is not None
            assert (problem.place, problem.value) == (f"{PLACE}_sha256", value)
            assert file_sha256(str(wrong if published is stated else right)) in problem.hint

    def test_first_use_downloads_once_and_preflight_never(self, hub: Stub) -> None:
        source = "hf://makers/net/net.pth"
        assert weights(source, DIGEST).problem() is None
        assert hub.requested == []
        assert Path(weights(source, DIGEST).path()).read_bytes() == CONTENT
        assert gets(hub) == ["/makers/net/resolve/main/net.pth"]
        requested = len(hub.requested)
        assert weights(source).digest() == DIGEST
        assert len(hub.requested) == requested
        assert refusal(weights(source, "0" * 64).path) == (f"{PLACE}_sha256", "0" * 64)

    @pytest.mark.parametrize(
        ("source", "cause"),
        [
            ("hf://closed/net/net.pth", huggingface_hub.errors.GatedRepoError),
            ("hf://makers/net/no-file.pth", huggingface_hub.errors.RemoteEntryNotFoundError),
            ("hf://gone/net/net.pth", Exception),
        ],
    )
    def test_each_refusal_of_the_hub_is_one_message(self, hub: Stub, source: str, cause: type[Exception]) -> None:
        error = refused(weights(source).path)
        assert (error.place, error.value) == (PLACE, source)
        assert isinstance(error.__cause__, cause)


class TestModels:
    def folder(self, tmp_path: Path, **others: bytes) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        for name, content in {**MODEL, **others}.items():
            (folder / name).write_bytes(content)
        return folder

    def test_missing_models_are_refused(self, cache: Path, tmp_path: Path) -> None:
        sources = (None, "", str(tmp_path / "nowhere"), "./nowhere", "nowhere", "a/b/c", "makers/net", "makers/net@v2")
        for source in (*sources, str(tmp_path)):
            assert refusal(lambda named: model(named).path(), source) == (MODEL_PLACE, source)

    def test_incomplete_models_are_refused(self, cache: Path, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        index = folder / "model.safetensors.index.json"
        parts = {part: f"model-0000{part}-of-00002.safetensors" for part in "12"}
        index.write_text(json.dumps({"weight_map": parts}))
        assert parts["2"] in refused(model(str(folder)).path).hint
        index.unlink()
        (folder / parts["1"]).unlink()
        assert "model.safetensors" in refused(model(str(folder)).path).hint
        # An interrupted download.
        put_into(cache, "makers/net", {"config.json": b"{}"})
        assert refused(model("makers/net").path).value == "makers/net"

    def test_digest_is_of_the_content_in_any_place(self, cache: Path, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        digest = model(str(folder)).digest()
        snapshot = put_into(cache, "makers/net", MODEL)
        assert Path(model("makers/net").path()) == snapshot
        assert model("makers/net").digest() == model(f"makers/net@{COMMIT}").digest() == digest
        for unrelated in ("README.md", "pytorch_model.bin", ".gitattributes"):
            (folder / unrelated).write_bytes(b"...")
        assert model(str(folder), digest[:8].upper()).digest() == digest
        error = refused(model(str(folder), "0" * 8).path)
        assert (error.place, error.value, digest in error.hint) == (f"{MODEL_PLACE}_sha256", "0" * 8, True)
        (folder / "config.json").write_bytes(b"{}\n")
        assert model(str(folder)).digest() != digest

    @pytest.mark.parametrize("pickled", [False, True])
    def test_download_takes_pickles_only_where_there_is_nothing_else(self, hub: Stub, pickled: bool) -> None:
        chosen = {"config.json": b"{}", "pytorch_model.bin" if pickled else "model.safetensors": b"tensors"}
        others = ["README.md", "pytorch_model.bin", "training_args.bin", "onnx/model.onnx", "sub/config.json"]
        hub.respond = partial(as_the_hub, files={**dict.fromkeys(others, b"others"), **chosen})
        source = model("makers/net")
        assert source.problem() is None
        folder = Path(source.path())
        assert {each.name: each.read_bytes() for each in folder.iterdir()} == chosen
        assert sorted(gets(hub)) == sorted(f"/makers/net/resolve/{COMMIT}/{name}" for name in chosen)
        assert source.path() == str(folder)
        assert len(gets(hub)) == 2


def test_of_loaded_models_the_one_that_was_used_least_lately_goes_first(tmp_path: Path) -> None:
    files = [tmp_path / f"{each}.pth" for each in range(5)]
    for file in files:
        file.write_bytes(file.name.encode())
    loaded: list[str] = []

    @load_once
    def load(weights: Weights) -> str:
        loaded.append(Path(str(weights.source)).stem)
        return loaded[-1]

    # Four are kept: 0 is used again before 4 comes, so 1 goes.
    for each in (0, 1, 2, 3, 0, 4, 0, 1):
        load(weights_of(files[each]))
    assert loaded == ["0", "1", "2", "3", "4", "1"]
