import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import safetensors.torch
import torch
from PIL import Image

from grpo_core.rewards.embedding import clip_rewards as clip_model
from grpo_core.rewards.embedding.clip import find_architecture
from grpo_core.rewards.embedding.clip_rewards import ClipModel, ClipScoreReward, load_clip
from grpo_core.rewards.model_reward import Placed
from tests.grpo_core.rewards.conftest import MEAN, NETWORK, STD, flat, noise, refusal, refused, save_changed


def reward(config: Path, weights: Path) -> ClipScoreReward:
    return ClipScoreReward(model=str(config), weights=str(weights))


def load(config: Path, weights: Path) -> ClipModel:
    return load_clip(reward(config, weights))


def fresh(config: Path, weights: Path) -> ClipModel:
    """A model that no other test has asked, so that its embeddings are counted from none."""
    settings = reward(config, weights)
    return clip_model._load_clip.__wrapped__(settings.clip_weights(), settings.architecture(), Placed())


def cosine_with(vector: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(vector, other, dim=0))


@pytest.mark.parametrize("size", [(32, 32), (40, 50), (90, 33)])
def test_image_equals_open_clip_itself(
    clip_config: Path, clip_weights: Path, clip_oracle: torch.nn.Module, size: tuple[int, int]
) -> None:
    image = noise(0, *size)
    with torch.no_grad():
        right = clip_oracle.encode_image(clip_oracle.transform(image)[None], normalize=True)[0]
    found = load(clip_config, clip_weights).image_embeddings([image])[0]
    torch.testing.assert_close(found, right, rtol=0, atol=1e-6)
    assert float(found.norm()) == pytest.approx(1, abs=1e-6)
    assert cosine_with(found, load(clip_config, clip_weights).image_embeddings([flat(0)])[0]) < 0.999


def test_text_equals_open_clip_itself(clip_config: Path, clip_weights: Path, clip_oracle: torch.nn.Module) -> None:
    model, tokenizer = load(clip_config, clip_weights), open_clip.get_tokenizer("ViT-B-32")
    for text in ("a red heart", "", "word " * 100):
        with torch.no_grad():
            right = clip_oracle.encode_text(tokenizer([text]), normalize=True)[0]
        torch.testing.assert_close(model.text_embeddings([text])[0], right, rtol=0, atol=1e-6)
    assert cosine_with(model.text_embeddings(["a red heart"])[0], model.text_embeddings([""])[0]) < 0.999


def test_configuration_says_how_images_are_prepared(clip_config: Path, clip_weights: Path, tmp_path: Path) -> None:
    image = noise(0, 32, 32)
    levels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    by_hand = (levels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    model = load(clip_config, clip_weights)
    torch.testing.assert_close(model._prepare(image), by_hand)
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(NETWORK))
    assert (
        cosine_with(load(bare, clip_weights).image_embeddings([image])[0], model.image_embeddings([image])[0]) < 0.9999
    )


def test_activation_of_the_configuration_counts(clip_config: Path, clip_weights: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps({**json.loads(clip_config.read_text()), "model_cfg": {**NETWORK, "quick_gelu": False}}))
    embeddings = [load(config, clip_weights).image_embeddings([noise(0, 32, 32)])[0] for config in (clip_config, plain)]
    assert not torch.allclose(*embeddings, atol=1e-5)


def test_same_bytes_in_another_shape_are_another_image(clip_config: Path, clip_weights: Path) -> None:
    wide = noise(0, 64, 16)
    tall = Image.frombytes("RGB", (16, 64), wide.tobytes())
    model = load(clip_config, clip_weights)
    assert not torch.equal(model.image_embeddings([wide])[0], model.image_embeddings([tall])[0])


def test_cache_is_bounded_and_forgets_the_oldest(
    clip_config: Path, clip_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip_model, "CACHED_EMBEDDINGS", 2)
    model = fresh(clip_config, clip_weights)
    seen = []
    compute = model._network.encode_image
    monkeypatch.setattr(model._network, "encode_image", lambda pixels: seen.append(pixels) or compute(pixels))
    for level in (0, 50, 0, 100, 0, 50):
        model.image_embeddings([flat(level)])
    # 0, 50; 0 again is cached; 100 pushes 50 out, so that 50 is computed again.
    assert len(seen) == 4
    assert len(model._embeddings) == 2


def test_model_is_loaded_once_and_consumes_no_random_numbers(
    clip_config: Path, clip_weights: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(clip_weights.read_bytes())
    before = torch.get_rng_state()
    model = fresh(clip_config, clip_weights)
    assert torch.equal(torch.get_rng_state(), before)
    assert load(clip_config, copy) is load(clip_config, clip_weights)
    assert not any(p.requires_grad or p.is_meta or p.dtype != torch.float32 for p in model._network.parameters())
    assert not any(buffer.is_meta for buffer in model._network.buffers())


def test_weights_in_half_precision_and_from_a_checkpoint_are_read(
    clip_config: Path, clip_weights: Path, tmp_path: Path
) -> None:
    tensors = safetensors.torch.load_file(clip_weights)
    half = save_changed(clip_weights, tmp_path / "half.safetensors", dict.fromkeys(tensors, torch.Tensor.half))
    checkpoint = tmp_path / "epoch_3.pt"
    scale = {"logit_scale": tensors["logit_scale"].reshape(1)}
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in {**tensors, **scale}.items()}}, checkpoint)
    right = load(clip_config, clip_weights).image_embeddings([noise(0, 32, 32)])[0]
    assert torch.equal(load(clip_config, checkpoint).image_embeddings([noise(0, 32, 32)])[0], right)
    assert cosine_with(load(clip_config, half).image_embeddings([noise(0, 32, 32)])[0], right) > 0.9999


@pytest.mark.parametrize(
    ("model", "release", "word"),
    [
        ("ViT-L14", None, "ViT-L-14"),
        ("ViT-L-14", None, "ViT-L-14-quickgelu"),
        ("ViT-B-32-quickgelu", "laion2b_s34b_b79k", "open_clip knows"),
        ("ViT-B-32", "laion5b", "laion2b_s34b_b79k"),
        ("ViT-B-16-SigLIP", "webli", "hf_tokenizer_name"),
        ("coca_ViT-B-32", "laion2b_s13b_b90k", "multimodal_cfg"),
    ],
)
def test_networks_that_would_score_wrongly_are_refused(model: str, release: str | None, word: str) -> None:
    assert word in refused(find_architecture, "rewards.clip_score.model", model, release).hint


@pytest.mark.parametrize(
    ("model", "release", "quick_gelu", "mean"),
    [
        ("ViT-L-14-quickgelu", None, True, 0.48145466),
        ("ViT-B-32", "laion2b_s34b_b79k", False, 0.48145466),
        ("ViT-L-14", "laion2b_s32b_b82k", False, 0.5),
    ],
)
def test_release_brings_its_own_preparation(model: str, release: str | None, quick_gelu: bool, mean: float) -> None:
    found = find_architecture("model", model, release)
    assert bool(found.network.get("quick_gelu")) == quick_gelu
    assert found.preparation["mean"][0] == mean


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    missing, text, other = tmp_path / "no.json", tmp_path / "text.json", tmp_path / "other.json"
    text.write_text("{")
    other.write_text("{}")
    for path, word in ((missing, "No such file"), (text, "JSON"), (other, "embed_dim")):
        error = refused(find_architecture, "model", str(path), None)
        assert (error.place, error.value) == ("model", str(path))
        assert word in error.hint
    given = refusal(find_architecture, "rewards.clip_score.model", str(other), "openai")
    assert given == ("rewards.clip_score.pretrained", "openai")
