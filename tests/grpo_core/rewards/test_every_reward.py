"""What holds for every reward, whatever it measures."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lpips
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from grpo_core.rewards.embedding.clip import ClipReward
from grpo_core.rewards.embedding.clip_rewards import load_clip
from grpo_core.rewards.image_statistics import JpegReward
from grpo_core.rewards.model_reward import exact_inference
from grpo_core.rewards.registry import REWARDS, build_reward, reward_class
from grpo_core.rewards.reward import Reward, score_samples
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch
from grpo_core.rewards.weights import Published, Weights
from grpo_core.seeds import file_sha256
from tests.grpo_core.rewards.conftest import flat, make_batch, make_texts, noise, refusal
from tests.grpo_core.rewards.ocr.lettering import draw

NEEDS_A_SERVER = ("judge", "remote")
OF_TEXTS: Mapping[str, Mapping[str, object]] = {
    "answer": {},
    "format": {"mode": "partial"},
    "box_iou": {},
    "function": {"function": "trl.rewards:think_format_reward", "conversational": True},
}
OF_IMAGES = sorted(REWARDS.keys() - OF_TEXTS.keys() - {*NEEDS_A_SERVER, "reward_model"})
# Other measures of a reward, which are tried too.
VARIANTS = {"diversity of pixels": "diversity", "diversity by lpips": "diversity"}
IMAGES = [draw("Exit", size=96), noise(0, 96, 96), flat(255, 96, 96), noise(2, 96, 96).convert("L")]
TARGETS = [noise(1, 96, 96), noise(1, 48, 48), flat(0, 96, 96), None]


@pytest.fixture
def settings(
    trunk_file: Path,
    clip_config: Path,
    clip_weights: Path,
    aesthetic_head: Path,
    pickscore_folder: Path,
    hpsv2_config: Path,
    hpsv2_weights: Path,
) -> Mapping[str, Mapping[str, object]]:
    clip = {"model": str(clip_config), "weights": str(clip_weights)}
    return {
        "lpips": {"weights": str(trunk_file)},
        "clip_score": clip,
        "aesthetic": {**clip, "head": str(aesthetic_head)},
        "diversity": {**clip, "measure": "clip"},
        "diversity of pixels": {},
        "diversity by lpips": {"measure": "lpips", "weights": str(trunk_file)},
        "pickscore": {"model": str(pickscore_folder)},
        "hpsv2": {"model": str(hpsv2_config), "weights": str(hpsv2_weights)},
        **OF_TEXTS,
    }


def batch_of(reward: Reward) -> ScoringBatch:
    groups = ["a", "a", "b", "b"]
    if reward.name in OF_TEXTS:
        completions = ("<think>1</think><answer>[0,0,2,2]</answer>", "<think>[0,0,1,2]", "no", "[0,0,2,2]")
        columns = {"answer": ["no"] * 3 + [None], "box": [[0, 0, 2, 2]] * 3 + [None]}
        return make_texts(*completions, columns=columns, group_ids=groups, token_ids=[[1]] * 4)
    prompts = ['a door "Exit"', 'a red "Exit"', 'a door "Exit"', "a red heart"]
    return make_batch(IMAGES, TARGETS, prompts=prompts, group_ids=groups)


def forget(reward: Reward) -> None:
    """Empty what a model remembers of the images."""
    if isinstance(reward, ClipReward) and getattr(reward, "measure", "clip") == "clip":
        load_clip(reward)._embeddings.clear()


@pytest.mark.parametrize("name", [*OF_IMAGES, *VARIANTS, *OF_TEXTS])
def test_a_score_depends_on_its_sample_and_siblings_alone(
    name: str, settings: Mapping[str, Mapping[str, object]]
) -> None:
    reward = build_reward(VARIANTS.get(name, name), settings.get(name, {}))
    batch = batch_of(reward)
    together = list(reward.score(batch))
    assert len({score.raw for score in together}) > 1
    assert all(score.value is None or 0 <= score.value <= 1 for score in together)
    forget(reward)
    parts = [[0, 1], [2, 3]] if reward.needs.group else [[0], [1], [2], [3]]
    assert [score for rows in parts for score in reward.score(batch.select(rows))] == together
    forget(reward)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert list(reward.score(batch.select([3, 2, 1, 0]))) == together[::-1]


OF_NETWORKS = ["lpips", "clip_score", "aesthetic", "pickscore", "hpsv2", "diversity", "diversity by lpips"]


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-5), ("bfloat16", 0.1)])
@pytest.mark.parametrize("name", OF_NETWORKS)
def test_a_network_scores_batches_as_it_scores_samples_alone(
    name: str, dtype: str, apart: float, settings: Mapping[str, Mapping[str, object]]
) -> None:
    sides = [(96, 96), (48, 48), (64, 96), (32, 48), (64, 96)]
    images = [noise(seed, *side) for seed, side in enumerate(sides)]
    batch = make_batch(
        images,
        [noise(9, *image.size) for image in images],
        prompts=["a", "a", "a red door behind a tree", "", "7 7 7"],
        group_ids=["a", "a", "b", "b", "b"],
    )
    alone, own = build_reward(VARIANTS.get(name, name), settings[name]), {**settings[name], "dtype": dtype}
    forget(alone)
    expected = [score.raw for score in alone.score(batch)]
    together = build_reward(alone.name, {**own, "batch_size": 2})
    forget(together)
    with largest_pass() as largest:
        found = [score.raw for score in together.score(batch)]
    assert largest == [2]
    assert found == pytest.approx(expected, rel=apart, abs=apart)
    assert (found != expected) if dtype == "bfloat16" else True
    # What another batch has computed is none of its own.
    assert [score.raw for score in alone.score(batch)] == expected
    changed = {"batch_size": 2} | ({"dtype": dtype} if dtype == "bfloat16" else {})
    assert together.settings() == {**alone.settings(), **changed}


@contextmanager
def largest_pass() -> Iterator[list[int]]:
    """Yield a list with the largest number of rows that a convolution or an embedding of ids got within the block."""
    largest = [0]

    def look(module: nn.Module, given: tuple[Tensor, ...], _: object) -> None:
        if isinstance(module, nn.Conv2d | nn.Embedding) and given[0].ndim > 1:
            largest[0] = max(largest[0], len(given[0]))

    with nn.modules.module.register_module_forward_hook(look):
        yield largest


@pytest.mark.parametrize(("setting", "value"), [("batch_size", 0), ("dtype", "float16"), ("device", "gpu")])
@pytest.mark.parametrize("name", [*OF_NETWORKS, "reward_model"])
def test_what_no_pass_can_have_is_refused(name: str, setting: str, value: object) -> None:
    name = VARIANTS.get(name, name)
    assert refusal(build_reward, name, {setting: value}) == (f"rewards.{name}.{setting}", value)


def test_pixels_have_no_passes() -> None:
    for setting, value in (("batch_size", 2), ("dtype", "bfloat16")):
        assert refusal(build_reward, "diversity", {setting: value}) == (f"rewards.diversity.{setting}", value)


@pytest.mark.parametrize("name", ["clip_score", "pickscore", "hpsv2"])
def test_long_prompts_are_cut_with_a_warning_or_refused(
    name: str, settings: Mapping[str, Mapping[str, object]], caplog: pytest.LogCaptureFixture
) -> None:
    reward, refusing = (build_reward(name, {**settings[name], "long_prompts": each}) for each in ("cut", "refuse"))
    images = [noise(seed, 64, 64) for seed in range(3)]
    whole, long = (make_batch(images, prompts=["s", "a " * words, "b " * words]) for words in (75, 76))
    with caplog.at_level(logging.WARNING):
        assert reward.score(whole) == refusing.score(whole)
        assert "longer than" not in caplog.text
        assert reward.score(long) == reward.score(whole)
    assert "2 of 3 prompts are longer than the 77 tokens" in caplog.text
    assert refusal(refusing.score, long) == (f"rewards.{name}, sample s1", "prompt of 78 tokens")


@pytest.mark.parametrize("name", OF_IMAGES)
def test_images_stay_as_they_were_and_one_of_an_unknown_mode_is_refused(
    name: str, settings: Mapping[str, Mapping[str, object]]
) -> None:
    reward = build_reward(name, settings.get(name, {}))
    batch = batch_of(reward)
    before = [image.tobytes() for image in (*batch.images, *TARGETS) if image is not None]
    reward.score(batch)
    assert [image.tobytes() for image in (*batch.images, *TARGETS) if image is not None] == before
    unknown = make_batch([Image.new("F", (96, 96))] * 2, [flat(0)] * 2, prompts=['"Exit"'] * 2, group_ids=["g"] * 2)
    assert refusal(reward.score, unknown) == (f"rewards.{name}, sample s0", "image of mode F")


def test_every_reward_keeps_the_protocol(settings: Mapping[str, Mapping[str, object]], trunk_file: Path) -> None:
    assert set(REWARDS) == {str(reward_class(name).name) for name in REWARDS}
    for name in (*OF_IMAGES, *OF_TEXTS):
        reward = build_reward(name, settings.get(name, {}))
        assert json.loads(json.dumps(reward.settings())) == reward.settings()
        assert str(trunk_file.parents[1]) not in json.dumps(reward.settings())
        assert reward.preflight() == []
        if name in OF_IMAGES:
            (score,) = reward.score(make_batch([flat(7)]))
            # Without a target, siblings or quoted words there is nothing to say.
            silent = reward.needs.target or reward.needs.group or name == "text_accuracy"
            assert (score == NOT_APPLICABLE) == silent


def test_provenance_names_the_weights_by_their_content(
    settings: Mapping[str, Mapping[str, object]],
    trunk_file: Path,
    clip_weights: Path,
    aesthetic_head: Path,
    hpsv2_weights: Path,
    pickscore_folder: Path,
) -> None:
    heads = Path(lpips.__file__).parent / "weights" / "v0.1" / "alex.pth"
    files: Mapping[str, Mapping[str, Path]] = {
        "lpips": {"trunk": trunk_file, "heads": heads},
        "clip_score": {"clip": clip_weights},
        "aesthetic": {"clip": clip_weights, "head": aesthetic_head},
        "diversity": {"clip": clip_weights},
        "hpsv2": {"model": hpsv2_weights},
    }
    for name, roles in files.items():
        expected = {role: file_sha256(str(file)) for role, file in roles.items()}
        assert build_reward(name, settings[name]).weight_digests() == expected
    pickscore = build_reward("pickscore", settings["pickscore"])
    assert pickscore.weight_digests() == {
        "model": Weights("model", str(pickscore_folder), None, Published("its makers")).digest()
    }
    kinds = [{}, {"measure": "lpips", "weights": str(trunk_file)}, settings["diversity"]]
    diversities = [build_reward("diversity", kind) for kind in kinds]
    named = [{"measure"}, {"measure", "net"}, {"measure", "model", "pretrained"}]
    assert [set(reward.settings()) for reward in diversities] == named
    assert ["open-clip-" in reward.version for reward in diversities] == [False, False, True]


@pytest.mark.parametrize(
    ("name", "given", "setting", "published"),
    [
        ("lpips", {}, "weights", "alexnet-owt-7be5be79.pth"),
        ("lpips", {"net": "vgg"}, "weights", "vgg16-397923af.pth"),
        ("lpips", {"net": "squeeze", "weights": "nowhere.pth"}, "weights", "squeezenet1_1-b8a52dc0.pth"),
        ("diversity", {"measure": "lpips"}, "weights", "alexnet-owt-7be5be79.pth"),
        ("diversity", {"measure": "clip"}, "weights", "hf://timm/vit_large_patch14_clip_224.openai/"),
        ("clip_score", {}, "weights", "hf://timm/vit_large_patch14_clip_224.openai/open_clip_model.safetensors"),
        ("aesthetic", {}, "weights", "hf://timm/vit_large_patch14_clip_224.openai/"),
        ("hpsv2", {}, "weights", "https://huggingface.co/xswu/HPSv2"),
        ("pickscore", {}, "model", "yuvalkirstain/PickScore_v1"),
        ("reward_model", {}, "model", "Skywork/"),
    ],
)
def test_missing_weights_are_reported_before_and_when_needed(
    name: str, given: Mapping[str, object], setting: str, published: str
) -> None:
    reward = build_reward(name, given)
    problem = reward.preflight()[0]
    assert problem.startswith(f"rewards.{name}.{setting}: got {given.get('weights')!r}.")
    assert published in problem
    batch = make_texts("x") if name == "reward_model" else make_batch([flat(0)] * 2, [flat(0)] * 2, group_ids=["g"] * 2)
    assert refusal(reward.score, batch)[0].startswith(f"rewards.{name}.")


def test_settings_build_the_same_reward_again() -> None:
    reward = build_reward("jpeg", {"quality": 30, "direction": "incompressible"})
    assert build_reward("jpeg", reward.settings()) == reward


def test_another_number_of_scores_than_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JpegReward, "score", lambda self, batch: [Score(0.5, 0.5)])
    assert refusal(score_samples, JpegReward(), make_batch([flat(0)] * 2)) == ("reward jpeg", "1 scores")


@pytest.mark.parametrize("previous", ["high", "medium"])
def test_products_are_exact_inside_and_as_before_outside(previous: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(previous)
    try:
        with exact_inference("cuda"):
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == previous
        with pytest.raises(KeyError), exact_inference("cuda"):
            raise KeyError
        assert torch.get_float32_matmul_precision() == previous
    finally:
        torch.set_float32_matmul_precision(before)


SSIM, ANSWER = build_reward("ssim"), build_reward("answer")
IMAGE, OTHER = noise(0, 32, 32), flat(0, 32, 32)


def test_outputs_score_as_in_a_run() -> None:
    scores = SSIM([IMAGE, OTHER, IMAGE], targets=[IMAGE, IMAGE, None])
    assert scores == list(SSIM.score(make_batch([IMAGE, OTHER, IMAGE], targets=[IMAGE, IMAGE, None])))
    assert scores[0].value == pytest.approx(1.0)
    assert [score.value for score in ANSWER(["4", "5"], answer=["4", "4"])] == [1.0, 0.0]


def test_siblings_are_all_outputs_unless_groups_are_given() -> None:
    diversity = build_reward("diversity")
    together, apart = diversity([IMAGE, OTHER]), diversity([IMAGE, OTHER], group_ids=["a", "b"])
    assert [score.value for score in together] != [score.value for score in apart]


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda: SSIM([IMAGE]), "rewards.ssim, targets"),
        (lambda: SSIM([IMAGE], targets=[IMAGE, IMAGE]), "rewards.ssim, targets"),
        (lambda: SSIM(IMAGE, targets=[IMAGE]), "rewards.ssim"),
        (lambda: SSIM(["text"], targets=[IMAGE]), "rewards.ssim"),
        (lambda: SSIM([IMAGE, "text"], targets=[IMAGE, IMAGE]), "rewards.ssim"),
        (lambda: ANSWER(["4"]), "rewards.answer, answer"),
    ],
)
def test_what_a_call_lacks_is_named(call: Callable[[], list[Score]], place: str) -> None:
    assert refusal(call)[0] == place
