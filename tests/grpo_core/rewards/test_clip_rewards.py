"""Rewards from CLIP embeddings against open_clip and transformers: prompts, ratings, which image people prefer."""

import re
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import open_clip
import pytest
import safetensors.torch
import torch
from PIL import Image
from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizerFast

from grpo_core.rewards.embedding.clip_rewards import (
    HEAD,
    LAYERS,
    NO_DIRECTION,
    AestheticReward,
    ClipScoreReward,
    load_clip,
)
from grpo_core.rewards.embedding.preference import HpsV2Reward, PickScoreReward
from grpo_core.rewards.reward import Reward
from grpo_core.rewards.scoring_batch import Score, ScoringBatch
from tests.grpo_core.rewards.conftest import SIDE, flat, make_batch, make_head, noise, refused, save_changed

PROMPTS = ("a red heart", "two blue squares", "a red heart", "nothing at all")


IMAGES = (flat(255), noise(0, 40, 50), noise(1, 32, 32), flat(0))


def with_prompts(prompts: tuple[str, ...] = PROMPTS) -> ScoringBatch:
    return make_batch(IMAGES[: len(prompts)], prompts=prompts)


@pytest.fixture
def clip_score(clip_config: Path, clip_weights: Path) -> ClipScoreReward:
    return ClipScoreReward(model=str(clip_config), weights=str(clip_weights))


def test_value_and_raw_equal_open_clip_itself(clip_score: ClipScoreReward, clip_oracle: torch.nn.Module) -> None:
    batch, tokenizer = with_prompts(), open_clip.get_tokenizer("ViT-B-32")
    scores = clip_score.score(batch)
    with torch.no_grad():
        pixels = torch.stack([clip_oracle.transform(image) for image in batch.images])
        images = clip_oracle.encode_image(pixels, normalize=True)
        texts = clip_oracle.encode_text(tokenizer(list(batch.prompts)), normalize=True)
    cosines = (images * texts).sum(1).tolist()
    assert [score.raw for score in scores] == pytest.approx(cosines, abs=1e-6)
    assert [score.value for score in scores] == pytest.approx([max(cosine, 0) for cosine in cosines], abs=1e-6)
    # Both sides of zero are among them, or the floor would not have been seen.
    assert min(cosines) < -0.01
    assert max(cosines) > 0.01


def test_scale_multiplies_and_ends_at_one(clip_score: ClipScoreReward, clip_config: Path, clip_weights: Path) -> None:
    raws = [score.raw for score in clip_score.score(with_prompts())]
    for scale in (2.5, 100.0):
        scaled = ClipScoreReward(model=str(clip_config), weights=str(clip_weights), scale=scale).score(with_prompts())
        assert [score.raw for score in scaled] == raws
        assert [s.value for s in scaled] == pytest.approx([min(max(scale * r, 0), 1) for r in raws if r is not None])


def test_embedding_without_direction_is_a_failure(clip_config: Path, clip_weights: Path, tmp_path: Path) -> None:
    path = save_changed(clip_weights, tmp_path / "zero.safetensors", {"text_projection": torch.zeros_like})
    scores = ClipScoreReward(model=str(clip_config), weights=str(path)).score(with_prompts())
    assert scores == [Score.failed(NO_DIRECTION)] * 4


def test_provenance_names_the_content_and_no_path(
    clip_score: ClipScoreReward, clip_config: Path, clip_weights: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere.json"
    moved.write_bytes(clip_config.read_bytes())
    assert clip_score.version == f"1+open-clip-{open_clip.__version__}"
    assert ClipScoreReward(model=str(moved), weights=str(clip_weights)).settings() == clip_score.settings()
    assert str(clip_config) not in str(clip_score.settings())
    moved.write_text(clip_config.read_text().replace("0.4", "0.3"))
    assert ClipScoreReward(model=str(moved), weights=str(clip_weights)).settings() != clip_score.settings()
    assert ClipScoreReward().settings()["pretrained"] == "openai"


def test_preflight_reports_everything_at_once(clip_config: Path) -> None:
    absent = f"cuda:{torch.cuda.device_count()}"
    first, second = ClipScoreReward(device=absent).preflight()
    assert first.startswith("rewards.clip_score.weights: got None.")
    assert "hf://timm/vit_large_patch14_clip_224.openai/open_clip_model.safetensors" in first
    assert second.startswith(f"rewards.clip_score.device: got '{absent}'")
    for settings, start in (
        ({"model": "ViT-L-14"}, "model: got 'ViT-L-14'"),
        ({"model": "no.json"}, "model: got 'no.json'"),
        (
            {"model": str(clip_config), "weights": str(clip_config), "weights_sha256": "0" * 8},
            "weights_sha256: got '00000000'",
        ),
    ):
        message = ClipScoreReward(**settings).preflight()[0]
        assert message.startswith(f"rewards.clip_score.{start}")


@pytest.fixture
def aesthetic(clip_config: Path, clip_weights: Path, aesthetic_head: Path) -> AestheticReward:
    return AestheticReward(model=str(clip_config), weights=str(clip_weights), head=str(aesthetic_head))


def composed(tensors: dict[str, torch.Tensor]) -> tuple[np.ndarray, float]:
    """Five layers without activations are one: their matrix and offset, in double precision."""
    matrix, offset = np.eye(tensors["layers.0.weight"].shape[1]), np.zeros(tensors["layers.0.weight"].shape[1])
    for layer, _ in LAYERS:
        weight, bias = (tensors[f"{layer}.{part}"].double().numpy() for part in ("weight", "bias"))
        matrix, offset = weight @ matrix, weight @ offset + bias
    return matrix[0], float(offset[0])


def test_rating_is_the_composed_linear_map_of_the_unit_embedding(
    aesthetic: AestheticReward, clip_oracle: torch.nn.Module
) -> None:
    matrix, offset = composed(make_head())
    with torch.no_grad():
        raw = [clip_oracle.encode_image(clip_oracle.transform(image)[None])[0].double() for image in IMAGES]
    right = [float(matrix @ (vector / vector.norm()).numpy()) + offset for vector in raw]
    without_norm = [float(matrix @ vector.numpy()) + offset for vector in raw]
    scores = aesthetic.score(make_batch(IMAGES))
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


def test_two_rewards_compute_each_image_once(
    aesthetic: AestheticReward, clip_score: ClipScoreReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_clip(aesthetic)
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
        found = list(pool.map(score, (aesthetic, clip_score)))
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
    error = refused(reward.score, make_batch([flat(0)]))
    assert (error.place, error.value) == ("rewards.aesthetic.head", str(path))
    assert word in error.hint
    assert reward.preflight() == [str(error)]


def test_a_missing_head_and_the_digest_of_the_published_one(aesthetic_head: Path, tmp_path: Path) -> None:
    message = AestheticReward().preflight()[1]
    assert message.startswith("rewards.aesthetic.head: got None.")
    assert HEAD.url in message
    published = tmp_path / HEAD.file
    published.write_bytes(aesthetic_head.read_bytes())
    message = AestheticReward(head=str(published)).preflight()[1]
    assert message.startswith("rewards.aesthetic.head_sha256: got '21dd590f3ccdc646'")


PREFERRED = ("a red heart", "two blue squares", "a red heart", "nothing")


def preference_batch(prompts: tuple[str, ...] = PREFERRED) -> ScoringBatch:
    images = [noise(0, SIDE, SIDE), flat(255, SIDE, SIDE), noise(1, SIDE, SIDE), flat(0, SIDE, SIDE)][: len(prompts)]
    return make_batch(images, prompts=prompts)


@pytest.fixture
def pickscore(pickscore_folder: Path) -> PickScoreReward:
    return PickScoreReward(model=str(pickscore_folder))


@pytest.fixture
def hpsv2(hpsv2_config: Path, hpsv2_weights: Path) -> HpsV2Reward:
    return HpsV2Reward(weights=str(hpsv2_weights), model=str(hpsv2_config))


def test_pickscore_is_the_logit_of_transformers(pickscore: PickScoreReward, pickscore_folder: Path) -> None:
    batch = preference_batch()
    scores = pickscore.score(batch)
    model = CLIPModel.from_pretrained(pickscore_folder).eval()
    tokens = CLIPTokenizerFast.from_pretrained(pickscore_folder)(list(batch.prompts), padding=True, return_tensors="pt")
    prepare = CLIPImageProcessor(do_resize=False, do_center_crop=False)
    with torch.no_grad():
        pixels = prepare(list(batch.images), return_tensors="pt")
        right = model(**pixels, **tokens).logits_per_image.diagonal().tolist()
    assert [score.raw for score in scores] == pytest.approx(right, abs=1e-4)
    assert [score.value for score in scores] == pytest.approx([min(max(raw / 26, 0), 1) for raw in right], abs=1e-5)
    assert max(right) - min(right) > 0.1


def test_hpsv2_is_the_cosine_of_open_clip(hpsv2: HpsV2Reward, hpsv2_oracle: torch.nn.Module) -> None:
    batch, tokenizer = preference_batch(), open_clip.get_tokenizer("ViT-B-32")
    scores = hpsv2.score(batch)
    with torch.no_grad():
        images = torch.stack([hpsv2_oracle.transform(image) for image in batch.images])
        images = hpsv2_oracle.encode_image(images, normalize=True)
        texts = hpsv2_oracle.encode_text(tokenizer(list(batch.prompts)), normalize=True)
    right = (images * texts).sum(1).tolist()
    assert [score.raw for score in scores] == pytest.approx(right, abs=1e-6)
    assert [score.value for score in scores] == pytest.approx([min(max(raw / 0.5, 0), 1) for raw in right], abs=1e-5)
    assert max(right) - min(right) > 0.1


def test_hpsv2_pads_what_is_not_square_with_black(hpsv2: HpsV2Reward) -> None:
    # Shrunk, enlarged, and of the right length already: each is padded.
    for length in (SIDE * 2, SIDE // 2, SIDE):
        wide = flat(200, length, length // 2)
        padded = Image.new("RGB", (SIDE, SIDE))
        padded.paste(flat(200, SIDE, SIDE // 2), (0, SIDE // 4))
        images = [wide, padded, flat(200, SIDE, SIDE)]
        scores = hpsv2.score(make_batch(images, prompts=["x"] * 3))
        assert scores[0].raw == pytest.approx(scores[1].raw, abs=1e-5)
        assert scores[0].raw != pytest.approx(scores[2].raw, abs=1e-2)


def test_pickscore_cuts_the_middle_out_of_what_is_not_square(pickscore: PickScoreReward) -> None:
    wide = noise(3, SIDE * 2, SIDE)
    middle = wide.crop((SIDE // 2, 0, SIDE // 2 + SIDE, SIDE))
    scores = pickscore.score(make_batch([wide, middle], prompts=["x", "x"]))
    assert scores[0] == scores[1]


def test_weights_as_the_makers_publish_them_score_the_same(
    hpsv2: HpsV2Reward, hpsv2_config: Path, hpsv2_oracle: torch.nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "HPS_v2.1_compressed.pt"
    torch.save({"epoch": 2, "state_dict": hpsv2_oracle.state_dict()}, path)
    assert HpsV2Reward(weights=str(path), model=str(hpsv2_config)).score(preference_batch()) == hpsv2.score(
        preference_batch()
    )


def test_missing_tensors_are_refused(
    pickscore_folder: Path, hpsv2_config: Path, hpsv2_weights: Path, tmp_path: Path
) -> None:
    path = save_changed(hpsv2_weights, tmp_path / "hpsv2.safetensors", {"model.text_projection": None})
    error = refused(HpsV2Reward(weights=str(path), model=str(hpsv2_config)).score, preference_batch())
    assert (error.place, error.value) == ("rewards.hpsv2.weights", str(path))
    assert "text_projection" in error.hint
    folder = tmp_path / "pickscore"
    shutil.copytree(pickscore_folder, folder)
    file = "model.safetensors"
    save_changed(pickscore_folder / file, folder / file, {"text_projection.weight": None})
    error = refused(PickScoreReward(model=str(folder)).score, preference_batch())
    assert (error.place, error.value) == ("rewards.pickscore.model", str(folder))
    assert "text_projection.weight" in error.hint


def test_nan_of_the_weights_is_a_failure(hpsv2_config: Path, hpsv2_weights: Path, tmp_path: Path) -> None:
    nan = {"model.text_projection": lambda tensor: torch.full_like(tensor, torch.nan)}
    path = save_changed(hpsv2_weights, tmp_path / "model.safetensors", nan)
    scores = HpsV2Reward(weights=str(path), model=str(hpsv2_config)).score(preference_batch())
    assert scores == [Score.failed("the reward is nan, not a finite number")] * 4


def test_preflight_names_an_unknown_network() -> None:
    assert HpsV2Reward(model="no.json").preflight()[1].startswith("rewards.hpsv2.model: got 'no.json'")


@pytest.mark.parametrize(
    ("model", "release", "hub"),
    [
        ("ViT-B-32", "laion2b_s34b_b79k", "hf://laion/CLIP-ViT-B-32-laion2B-s34B-b79K/open_clip_model.safetensors"),
        ("ViTamin-S", "datacomp1b", "hf://jienengchen/ViTamin-S/pytorch_model.bin"),
    ],
)
def test_a_release_is_found_on_the_hub_by_the_name_that_open_clip_has_for_it(
    model: str, release: str, hub: str
) -> None:
    assert ClipScoreReward(model=model, pretrained=release).clip_weights().published.hub == hub


def test_every_release_that_open_clip_lists_is_one_file_of_the_hub() -> None:
    for model, release in open_clip.list_pretrained():
        hub = ClipScoreReward(model=model, pretrained=release).clip_weights().published.hub
        assert re.fullmatch(r"hf://[^/]+/[^/]+/[^/]+", str(hub)), (model, release, hub)
