""""""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from grpo_core.errors import InputError
from grpo_core.rewards.clip_rewards import HEAD, LAYERS, NO_DIRECTION, AestheticReward, ClipScoreReward, load_clip
from grpo_core.rewards.reward import Reward, Score
from tests.grpo_core.rewards.conftest import flat, make_batch, make_head, noise, save_changed

IMAGES = (flat(255), noise(0, 40, 50), noise(1, 32, 32), flat(0))


@pytest.fixture
def reward(clip_config: Path, clip_weights: Path, aesthetic_head: Path) -> AestheticReward:
    return AestheticReward(model=str(clip_config), weights=str(clip_weights), head=str(aesthetic_head))


def composed(tensors: dict[str, torch.Tensor]) -> tuple[np.ndarray, float]:
    """Five layers without activations are one: their matrix and offset, in double precision."""
    matrix, offset = np.eye(tensors["layers.0.weight"].shape[1]), np.zeros(tensors["layers.0.weight"].shape[1])
    for layer, _ in LAYERS:
        weight, bias = (tensors[f"{layer}.{part}"].double().numpy() for part in ("weight", "bias"))
        matrix, offset = weight @ matrix, weight @ offset + bias
    return matrix[0], float(offset[0])


def test_rating_is_the_composed_linear_map_of_the_unit_embedding(
    reward: AestheticReward, clip_oracle: torch.nn.Module
) -> None:
    matrix, offset = composed(make_head())
    with torch.no_grad():
        raw = [clip_oracle.encode_image(clip_oracle.transform(image)[None])[0].double() for image in IMAGES]
    right = [float(matrix @ (vector / vector.norm()).numpy()) + offset for vector in raw]
    without_norm = [float(matrix @ vector.numpy()) + offset for vector in raw]
    scores = reward.score(make_batch(IMAGES))
    assert [score.raw for score in scores] == pytest.approx(right, abs=1e-4)
    assert [score.value for score in scores] == pytest.approx([rating / 10 for rating in right], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(right, without_norm, strict=True)) > 0.1
    assert max(right) - min(right) > 0.1


@pytest.mark.parametrize(("offset", "value"), [(1000.0, 1.0), (-1000.0, 0.0)])
def test_value_is_clamped_and_raw_is_not(
    clip_config: Path, clip_weights: Path, tmp_path: Path, offset: float, value: float
) -> None:
    path = tmp_path / "head.safetensors"
    safetensors.torch.save_file(make_head(offset=offset), path)
    reward = AestheticReward(model=str(clip_config), weights=str(clip_weights), head=str(path))
    (score,) = reward.score(make_batch([flat(0)]))
    assert score.value == value
    assert score.raw == pytest.approx(offset, abs=20)


def test_clip_score_computes_no_image_again(
    reward: AestheticReward, clip_config: Path, clip_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_clip(reward)
    model._embeddings.clear()
    seen: list[torch.Tensor] = []
    compute = model._network.encode_image
    monkeypatch.setattr(model._network, "encode_image", lambda pixels: seen.append(pixels) or compute(pixels))
    batch = make_batch([noise(seed, 32, 32) for seed in range(8)])
    start = threading.Barrier(2)

    def score(each: Reward) -> Sequence[Score]:
        start.wait()
        return each.score(batch)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(score, (reward, ClipScoreReward(model=str(clip_config), weights=str(clip_weights)))))
    assert len(seen) == len(batch)
    assert all(score.value is not None for scores in found for score in scores)


def test_nan_of_the_head_and_of_the_embedding_are_failures(
    clip_config: Path, clip_weights: Path, aesthetic_head: Path, tmp_path: Path
) -> None:
    nan = tmp_path / "nan.pth"
    zero = save_changed(clip_weights, tmp_path / "zero.safetensors", {"visual.proj": torch.zeros_like})
    torch.save({**make_head(), "layers.7.bias": torch.tensor([torch.nan])}, nan)
    blind = AestheticReward(model=str(clip_config), weights=str(zero), head=str(aesthetic_head))
    assert blind.score(make_batch([flat(0)])) == [Score.failed(NO_DIRECTION)]
    (score,) = AestheticReward(model=str(clip_config), weights=str(clip_weights), head=str(nan)).score(
        make_batch([flat(0)])
    )
    assert score.value is None
    assert score.failure is not None


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (make_head(768), "needs embeddings of 768 numbers"),
        ({"layers.0.weight": Path.cwd}, "cannot be read"),
        ({k: v for k, v in make_head().items() if k != "layers.7.bias"}, "layers.7.bias is missing"),
        ({**make_head(), "layers.2.weight": torch.zeros(3, 3)}, "layers.2.weight has shape [3, 3]"),
    ],
)
def test_files_that_are_no_head_are_refused_before_and_at_the_first_score(
    clip_config: Path, clip_weights: Path, tmp_path: Path, content: object, word: str
) -> None:
    path = tmp_path / "head.pth"
    torch.save(content, path)
    reward = AestheticReward(model=str(clip_config), weights=str(clip_weights), head=str(path))
    with pytest.raises(InputError) as caught:
        reward.score(make_batch([flat(0)]))
    assert (caught.value.place, caught.value.value) == ("rewards.aesthetic.head", str(path))
    assert word in caught.value.hint
    assert reward.preflight() == [str(caught.value)]


def test_a_missing_head_and_the_digest_of_the_published_one(aesthetic_head: Path, tmp_path: Path) -> None:
    message = AestheticReward().preflight()[1]
    assert message.startswith("rewards.aesthetic.head: got None.")
    assert HEAD.url in message
    published = tmp_path / HEAD.file
    published.write_bytes(aesthetic_head.read_bytes())
    message = AestheticReward(head=str(published)).preflight()[1]
    assert message.startswith("rewards.aesthetic.head_sha256: got '21dd590f3ccdc646'")
