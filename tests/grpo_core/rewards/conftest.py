"""Samples, weights and small networks that the reward tests share."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from PIL import Image
from transformers import CLIPConfig, CLIPModel, CLIPTokenizerFast

from grpo_core.errors import InputError
from grpo_core.rewards.embedding.clip_rewards import LAYERS
from grpo_core.rewards.scoring_batch import ScoringBatch
from tests.grpo_core.rewards.stub import COMMIT, Stub, serve

NETWORK: dict[str, Any] = {
    "embed_dim": 12,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 16, "head_width": 8, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}
WIDTH = 12
SIDE = 64
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
SQUARE = {**NETWORK, "quick_gelu": False, "vision_cfg": {**NETWORK["vision_cfg"], "image_size": SIDE}}


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def alexnet() -> torch.nn.Module:
    """A randomly initialised AlexNet; its construction leaves the global random state alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: torch.nn.Module = torchvision.models.alexnet(weights=None)
    return model.eval()


@pytest.fixture(scope="session")
def trunk_file(alexnet: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The AlexNet's state dict as torchvision names it, with one tensor of the classifier standing for all."""
    path = tmp_path_factory.mktemp("weights") / "trunk.pth"
    kept = {k: v for k, v in alexnet.state_dict().items() if k.startswith("features.") or k == "classifier.6.bias"}
    torch.save(kept, path)
    return path


def spread_out(model: torch.nn.Module) -> None:
    """Initialise the matrices with large numbers: with the usual ones a network this small hardly sees its input."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "position" not in name:
            torch.nn.init.normal_(parameter, std=0.5)


def make_clip(config: Path, seed: int) -> torch.nn.Module:
    """Build the CLIP of a configuration file as open_clip does, with its preparation of images as `transform`."""
    import open_clip

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{config.parent}", load_weights=False)
        spread_out(model)
    model.eval().transform = transform
    oracle: torch.nn.Module = model
    return oracle


@pytest.fixture(scope="session")
def clip_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "open_clip_config.json"
    path.write_text(json.dumps({"model_cfg": NETWORK, "preprocess_cfg": {"mean": MEAN, "std": STD}}))
    return path


@pytest.fixture(scope="session")
def clip_oracle(clip_config: Path) -> torch.nn.Module:
    """A CLIP of a few thousand random parameters."""
    return make_clip(clip_config, seed=3)


@pytest.fixture(scope="session")
def clip_weights(clip_oracle: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip_weights") / "open_clip_model.safetensors"
    safetensors.torch.save_file(clip_oracle.state_dict(), path)
    return path


def make_head(width: int = WIDTH, offset: float = 5.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors, inputs = {}, width
    for layer, outputs in LAYERS:
        tensors[f"{layer}.weight"] = torch.randn(outputs, inputs, generator=generator) * 1.5 / inputs**0.5
        tensors[f"{layer}.bias"] = torch.randn(outputs, generator=generator) * 0.01
        inputs = outputs
    tensors["layers.7.bias"] += offset
    return tensors


@pytest.fixture(scope="session")
def aesthetic_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head") / "head.pth"
    torch.save(make_head(), path)
    return path


@pytest.fixture(scope="session")
def pickscore_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIPModel with a tokenizer of letters, as transformers saves them."""
    folder = tmp_path_factory.mktemp("pickscore")
    letters = [*"abcdefghijklmnopqrstuvwxyz", *(f"{letter}</w>" for letter in "abcdefghijklmnopqrstuvwxyz")]
    vocabulary = {token: index for index, token in enumerate([*letters, "<|startoftext|>", "<|endoftext|>"])}
    CLIPTokenizerFast(vocab=vocabulary, merges=[]).save_pretrained(folder)
    end = vocabulary["<|endoftext|>"]
    config = CLIPConfig(
        text_config={**TEXT, "vocab_size": len(vocabulary), "eos_token_id": end, "max_position_embeddings": 77},
        vision_config={**TEXT, "image_size": SIDE, "patch_size": 16},
        projection_dim=12,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = CLIPModel(config)
        spread_out(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def hpsv2_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hpsv2") / "open_clip_config.json"
    path.write_text(json.dumps({"model_cfg": SQUARE}))
    return path


@pytest.fixture(scope="session")
def hpsv2_oracle(hpsv2_config: Path) -> torch.nn.Module:
    return make_clip(hpsv2_config, seed=2)


@pytest.fixture(scope="session")
def hpsv2_weights(hpsv2_oracle: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hpsv2_weights") / "model.safetensors"
    safetensors.torch.save_file({f"model.{k}": v for k, v in hpsv2_oracle.state_dict().items()}, path)
    return path


Change = Callable[[torch.Tensor], torch.Tensor]


def save_changed(source: Path, target: Path, changes: Mapping[str, Change | torch.Tensor | None]) -> Path:
    """Copy a safetensors file with some tensors computed anew, replaced, added, or left out (None)."""
    tensors = safetensors.torch.load_file(source)
    for name, change in changes.items():
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change if isinstance(change, torch.Tensor) else change(tensors[name])
    safetensors.torch.save_file(tensors, target, metadata={"format": "pt"})
    return target


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serve() as service:
        yield service


@pytest.fixture
def closed_url() -> str:
    """An address without a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, offline."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


def put_into(cache: Path, repo: str, files: Mapping[str, bytes]) -> Path:
    """Write files into the cache as the Hub's client does; return the snapshot's folder."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for file, content in files.items():
        path = snapshot / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(COMMIT)
    return snapshot


def refused(call: Callable[..., object], *args: Any, **keywords: Any) -> InputError:
    """Return the InputError that the call must raise."""
    with pytest.raises(InputError) as caught:
        call(*args, **keywords)
    return caught.value


def refusal(call: Callable[..., object], *args: Any, **keywords: Any) -> tuple[str, object]:
    """Return place and value of the InputError that the call must raise."""
    error = refused(call, *args, **keywords)
    return error.place, error.value


def noise(seed: int, width: int, height: int) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def flat(level: int, width: int = 32, height: int = 32) -> Image.Image:
    return Image.new("RGB", (width, height), (level, level, level))


def make_batch(
    images: Sequence[Image.Image],
    targets: Sequence[Image.Image | None] | None = None,
    sample_ids: Sequence[str] | None = None,
    prompts: Sequence[str] | None = None,
    **more: Any,
) -> ScoringBatch:
    """A batch of images with sample ids s0, s1, ... unless given, without targets unless given."""
    count = len(images)
    return ScoringBatch(
        sample_ids=list(sample_ids or (f"s{i}" for i in range(count))),
        prompts=list(prompts or [""] * count),
        images=list(images),
        targets=list(targets) if targets is not None else [None] * count,
        **more,
    )


def make_texts(*completions: str, **more: Any) -> ScoringBatch:
    """A batch of texts with sample ids s0, s1, ..., the prompt of each "p"."""
    count = len(completions)
    fields: dict[str, Any] = {"sample_ids": [f"s{i}" for i in range(count)], "prompts": ["p"] * count}
    return ScoringBatch(**fields | {"completions": list(completions)} | more)
