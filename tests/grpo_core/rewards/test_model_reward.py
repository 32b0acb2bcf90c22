"""Weights are loaded in full precision, all of them, and never with their code."""

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from grpo_core.errors import InputError
from grpo_core.rewards.model_reward import load_model, load_state_dict, load_tokenizer, load_weights
from grpo_core.rewards.weights import Published, Weights
from tests.grpo_core.rewards.conftest import refusal, refused, save_changed

PLACE = "rewards.mine.weights"
CONFIG = BertConfig(
    vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=1
)


def weights(path: Path) -> Weights:
    return Weights(PLACE, str(path), None, Published("the makers", "net.pth"))


def model(folder: Path) -> Weights:
    return Weights(PLACE, str(folder), None, Published("the makers"))


def load(folder: Path) -> torch.nn.Module:
    return load_model(model(folder), AutoModelForSequenceClassification)


def refuse(path: Path) -> None:
    assert refusal(load_state_dict, weights(path)) == (PLACE, str(path))


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
                load_state_dict(weights(path))

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
        error = refused(load_weights, weights(tmp_path / "f"), torch.nn.Linear(2, 1), tensors, "a line")
        assert (error.place, error.value) == (PLACE, str(tmp_path / "f"))
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


class TestModels:
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
        assert refusal(load, folder) == (PLACE, str(folder))
        assert not trace.exists()

    def test_files_of_another_or_a_broken_model_are_refused(self, saved: Path, folder: Path) -> None:
        file, config = "model.safetensors", "config.json"
        content = (saved / file).read_bytes()
        broken = [(file, content[:-100]), (file, b""), (config, b"{"), (config, b'{"model_type": "clip_text_model"}')]
        for name, damaged in broken:
            (folder / name).write_bytes(damaged)
            assert refusal(load, folder) == (PLACE, str(folder))
            (folder / name).write_bytes((saved / name).read_bytes())
        for changed in (None, torch.zeros(3, 8)):
            save_changed(saved / file, folder / file, {"classifier.weight": changed})
            assert refusal(load, folder) == (PLACE, str(folder))

    def test_a_missing_or_broken_tokenizer_is_refused(self, folder: Path) -> None:
        for content in (None, '{"version": '):
            if content:
                (folder / "tokenizer.json").write_text(content)
            assert refusal(load_tokenizer, model(folder)) == (PLACE, str(folder))
