import shutil
from pathlib import Path

import open_clip
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizerFast

from grpo_core.rewards.embedding.preference import HpsV2Reward, PickScoreReward
from grpo_core.rewards.scoring_batch import Score, ScoringBatch
from tests.grpo_core.rewards.conftest import SIDE, flat, noise, refused, save_changed
from tests.grpo_core.rewards.conftest import make_batch as make_image_batch

PROMPTS = ("a red heart", "two blue squares", "a red heart", "nothing")


def make_batch(prompts: tuple[str, ...] = PROMPTS) -> ScoringBatch:
    images = [noise(0, SIDE, SIDE), flat(255, SIDE, SIDE), noise(1, SIDE, SIDE), flat(0, SIDE, SIDE)][: len(prompts)]
    return make_image_batch(images, prompts=prompts)


@pytest.fixture
def pickscore(pickscore_folder: Path) -> PickScoreReward:
    return PickScoreReward(model=str(pickscore_folder))


@pytest.fixture
def hpsv2(hpsv2_config: Path, hpsv2_weights: Path) -> HpsV2Reward:
    return HpsV2Reward(weights=str(hpsv2_weights), model=str(hpsv2_config))


def test_pickscore_is_the_logit_of_transformers(pickscore: PickScoreReward, pickscore_folder: Path) -> None:
    batch = make_batch()
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
    batch, tokenizer = make_batch(), open_clip.get_tokenizer("ViT-B-32")
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
        scores = hpsv2.score(make_image_batch(images, prompts=["x"] * 3))
        assert scores[0].raw == pytest.approx(scores[1].raw, abs=1e-5)
        assert scores[0].raw != pytest.approx(scores[2].raw, abs=1e-2)


def test_pickscore_cuts_the_middle_out_of_what_is_not_square(pickscore: PickScoreReward) -> None:
    wide = noise(3, SIDE * 2, SIDE)
    middle = wide.crop((SIDE // 2, 0, SIDE // 2 + SIDE, SIDE))
    scores = pickscore.score(make_image_batch([wide, middle], prompts=["x", "x"]))
    assert scores[0] == scores[1]


def test_weights_as_the_makers_publish_them_score_the_same(
    hpsv2: HpsV2Reward, hpsv2_config: Path, hpsv2_oracle: torch.nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "HPS_v2.1_compressed.pt"
    torch.save({"epoch": 2, "state_dict": hpsv2_oracle.state_dict()}, path)
    assert HpsV2Reward(weights=str(path), model=str(hpsv2_config)).score(make_batch()) == hpsv2.score(make_batch())


def test_missing_tensors_are_refused(
    pickscore_folder: Path, hpsv2_config: Path, hpsv2_weights: Path, tmp_path: Path
) -> None:
    path = save_changed(hpsv2_weights, tmp_path / "hpsv2.safetensors", {"model.text_projection": None})
    error = refused(HpsV2Reward(weights=str(path), model=str(hpsv2_config)).score, make_batch())
    assert (error.place, error.value) == ("rewards.hpsv2.weights", str(path))
    assert "text_projection" in error.hint
    folder = tmp_path / "pickscore"
    shutil.copytree(pickscore_folder, folder)
    file = "model.safetensors"
    save_changed(pickscore_folder / file, folder / file, {"text_projection.weight": None})
    error = refused(PickScoreReward(model=str(folder)).score, make_batch())
    assert (error.place, error.value) == ("rewards.pickscore.model", str(folder))
    assert "text_projection.weight" in error.hint


def test_nan_of_the_weights_is_a_failure(hpsv2_config: Path, hpsv2_weights: Path, tmp_path: Path) -> None:
    nan = {"model.text_projection": lambda tensor: torch.full_like(tensor, torch.nan)}
    path = save_changed(hpsv2_weights, tmp_path / "model.safetensors", nan)
    scores = HpsV2Reward(weights=str(path), model=str(hpsv2_config)).score(make_batch())
    assert scores == [Score.failed("the reward is nan, not a finite number")] * 4


def test_preflight_names_an_unknown_network() -> None:
    assert HpsV2Reward(model="no.json").preflight()[1].startswith("rewards.hpsv2.model: got 'no.json'")
