"""A released model out of a GGUF file: read right, refused where it could be wrong in silence, and it learns."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.recipes.from_gguf import convert
from grpo_core.errors import InputError

MODEL = Path(__file__).parents[2] / "weights" / "SmolLM2-135M-Instruct"
needs_model = pytest.mark.skipif(not MODEL.is_dir(), reason="`make smollm2` makes weights/SmolLM2-135M-Instruct")


def write_gguf(path: Path, **metadata: str) -> Path:
    """Write a file of version 3 without tensors; metadata are texts."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    pairs = [text(name.replace("__", ".")) + struct.pack("<I", 8) + text(value) for name, value in metadata.items()]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
    return path


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general__architecture": "bert"}, "Its architecture is bert"),
        (
            {"general__architecture": "llama", "tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "viking"},
            "rules named viking",
        ),
        # Without a name transformers takes GPT-2's rules for it.
        ({"general__architecture": "llama", "tokenizer__ggml__model": "gpt2"}, "rules named default"),
        ({"general__architecture": "llama", "llama__rope__scaling__type": "yarn"}, "frequencies are scaled"),
        ({}, "no `general.architecture`"),
        (b"no model", "cannot be read as GGUF"),
        (b"GGUF\x03\x00\x00\x00", "cannot be read as GGUF"),
    ],
)
def test_what_could_be_read_wrong_is_refused(tmp_path: Path, metadata: dict[str, str] | bytes, reason: str) -> None:
    file = tmp_path / "model.gguf"
    if isinstance(metadata, bytes):
        file.write_bytes(metadata)
    else:
        write_gguf(file, **metadata)
    with pytest.raises(InputError, match=reason):
        convert(file, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
@needs_model
def test_a_released_model_is_read_as_it_was_trained() -> None:
    """With queries and keys in llama.cpp's order it does not speak; with GPT-2's cut line breaks stand alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"
    assert tokenizer.tokenize("a  12\n\n1.") == ["a", "ĠĠ", "1", "2", "ĊĊ", "1", "."]


@pytest.mark.slow
@needs_model
def test_a_released_model_learns_sums(tmp_path: Path) -> None:
    given = ("--set", f"policy.model={MODEL}", "--set", f"storage.root={tmp_path}", "--json")
    command = [sys.executable, "-m", "flows.command_line.main", "train", "configs/smollm2_sums.yaml", *given]
    done = subprocess.run(command, cwd=MODEL.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert (run["heldout_before"], run["heldout_after"]) == (pytest.approx(0.1, abs=0.1), pytest.approx(0.9, abs=0.1))


def test_no_heldout_sum_is_trained_on_in_either_order() -> None:
    def sums(name: str) -> set[frozenset[str]]:
        lines = (MODEL.parents[1] / "data" / "sums" / f"{name}.jsonl").read_text().splitlines()
        asked = [json.loads(line) for line in lines]
        for row in asked:
            left, right = row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?").split(" + ")
            assert int(row["answer"]) == int(left) + int(right)
        return {frozenset(row["prompt"][-1]["content"].removesuffix("?").split()[2::2]) for row in asked}

    assert sums("train").isdisjoint(sums("heldout"))
