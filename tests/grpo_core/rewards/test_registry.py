"""Every wrong setting of every reward and of its term in the mix, by place and value; values scaled by hand."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from grpo_core.rewards.mix import scaled_values
from grpo_core.rewards.registry import RewardTerm, build_reward
from tests.grpo_core.rewards.conftest import refusal, refused

NEEDED = {
    "remote": {"url": "http://host", "reward": "mine"},
    "judge": {"url": "http://host/v1", "model": "m"},
    "function": {"function": "module:score"},
}
NOT_POSITIVE = (0, -0.5, math.nan, math.inf, True, "1", None)
NOT_A_DEVICE = ("gpu", "cuda:", "cpu:1", "mps", None)
NOT_A_DIGEST = ("7be5", "z" * 64, 7)
NOT_A_NUMBER_OF = (0, 2.5, "8", True, math.nan)
NOT_BOOLEAN = (1, "yes", None)
URLS = ("", "host/v1", "ftp://host/x", "file:///etc/passwd", "127.0.0.1:80", "http://host/?key=x", 3)
RUBRICS = ("", " ", None, "{", "{}", "{0}", "{prompt.x}", "{prompt[0]}", "{prompt!r}", "{p:>9}")
WRONG: dict[str, dict[str, tuple[object, ...]]] = {
    "mse": {"full_scale": NOT_POSITIVE},
    "psnr": {"full_scale_db": NOT_POSITIVE},
    "lpips": {"net": ("alexnet", 3), "weights": (3, "", "hf://o/r"), "weights_sha256": NOT_A_DIGEST}
    | {"device": NOT_A_DEVICE},
    "text_accuracy": {
        "mode": ("exact",),
        "engine": ("easyocr",),
        "column": ("", 3),
        "attempts": (*NOT_A_NUMBER_OF, 101),
        "cls": (1, "no"),
        "limit_side_len": (0, 320.0, 4097),
        "max_side_len": (20, 8193),
        "languages": ("eng", "eng, chi_sim", "-x", ["eng"]),
    },
    "clip_score": {
        "model": ("ViT-L14", 3),
        "pretrained": (3, ""),
        "weights": (3, "hf://timm/no-file"),
        "weights_sha256": NOT_A_DIGEST,
        "scale": NOT_POSITIVE,
        "long_prompts": ("drop", None),
        "device": NOT_A_DEVICE,
    },
    "aesthetic": {"model": ("ViT",), "weights": (3,), "head": (3, "hf://x"), "head_sha256": NOT_A_DIGEST}
    | {"device": NOT_A_DEVICE},
    "pickscore": {"model": (3, " "), "model_sha256": NOT_A_DIGEST, "full_scale": NOT_POSITIVE}
    | {"long_prompts": ("drop",), "device": NOT_A_DEVICE},
    "hpsv2": {"weights": (3,), "weights_sha256": NOT_A_DIGEST, "model": ("ViT-H-14-quickgelu", 3)}
    | {"full_scale": NOT_POSITIVE, "long_prompts": (None,), "device": NOT_A_DEVICE},
    "jpeg": {"quality": (*NOT_A_NUMBER_OF, 101), "direction": ("small", 1)}
    | {"full_scale_kilobytes": NOT_POSITIVE[:-1]},
    "edge_density": {"low": NOT_POSITIVE, "high": (*NOT_POSITIVE, 49)},
    "sharpness": {"half": NOT_POSITIVE},
    "colour_entropy": {"bins": (*NOT_A_NUMBER_OF, 1, 65)},
    "diversity": {"measure": ("ssim",), "net": ("resnet",), "weights": (3, "", "alex.pth")}
    | {"weights_sha256": NOT_A_DIGEST, "device": NOT_A_DEVICE},
    "answer": {"column": ("", 3, None), "mode": ("loose",)},
    "format": {"mode": ("loose",), "format": ("think",), "pattern": ("(a", "", 4)},
    "box_iou": {"column": ("",), "width_column": (None,), "coordinates": ("percent",)}
    | {"threshold": (0, 1.5, math.nan, True, "0.5"), "image": (-1, 0.5, True)}
    | {"factor": NOT_A_NUMBER_OF, "min_pixels": NOT_A_NUMBER_OF, "max_pixels": (0, 3135, 1e6)},
    "reward_model": {"model": (3, " "), "model_sha256": NOT_A_DIGEST, "scale": ("tanh",)}
    | {"max_length": NOT_A_NUMBER_OF, "device": NOT_A_DEVICE},
    "judge": {
        "url": URLS,
        "model": ("", 3),
        "rubric": RUBRICS,
        "low": ("0", math.nan, 1e9),
        "high": (0.0, math.inf, True),
        "max_tokens": NOT_A_NUMBER_OF,
        "seed": (-1, 2**31),
        "json_schema": (1, "yes"),
        "concurrency": (*NOT_A_NUMBER_OF, 257),
        "attempts": (*NOT_A_NUMBER_OF, 101),
        "timeout_s": NOT_POSITIVE,
        "backoff_s": NOT_POSITIVE,
        "token_env": ("x y", 3),
    },
    "function": {
        "function": ("", "module.function", 3),
        "arguments": ([1], {"a": math.nan}, {"a": {1}}, {1: 2}),
        "factory": (1, "yes"),
        "conversational": (1, "yes"),
        "by_group": NOT_BOOLEAN,
        "with_targets": NOT_BOOLEAN,
        "on_error": ("ignore", 1),
        "revision": (3,),
    },
    "remote": {"url": URLS, "reward": ("", 3), "reward_version": (7, ""), "batch_size": (*NOT_A_NUMBER_OF, 4097)}
    | {"by_group": NOT_BOOLEAN, "with_targets": NOT_BOOLEAN},
}


@pytest.mark.parametrize(("name", "setting"), [(name, setting) for name in WRONG for setting in WRONG[name]])
def test_a_wrong_setting_is_named_with_its_value(name: str, setting: str) -> None:
    for value in WRONG[name][setting]:
        error = refused(build_reward, name, {**NEEDED.get(name, {}), setting: value})
        assert error.place == f"rewards.{name}.{setting}"
        if setting != "token_env" and value == value:
            assert error.value == value
        assert error.hint.endswith((".", ")", "?"))


@pytest.mark.parametrize(
    ("name", "settings", "place"),
    [
        ("format", {"pattern": "a", "format": "think_answer"}, "pattern"),
        ("format", {"pattern": "a", "mode": "partial"}, "mode"),
        ("box_iou", {"min_pixels": 5, "max_pixels": 4}, "max_pixels"),
        ("text_accuracy", {"engine": "tesseract", "cls": False}, "cls"),
        ("text_accuracy", {"engine": "tesseract", "max_side_len": 768}, "max_side_len"),
        ("edge_density", {"low": 9.0, "high": 8.0}, "high"),
        ("diversity", {"measure": "clip", "weights": ""}, "weights"),
        ("remote", {"reward": "mine"}, "url"),
        ("judge", {"url": "http://host"}, "model"),
        ("function", {}, "function"),
    ],
)
def test_settings_that_contradict_or_are_missing(name: str, settings: dict[str, object], place: str) -> None:
    assert refused(build_reward, name, settings).place == f"rewards.{name}.{place}"


@pytest.mark.parametrize(("setting", "value"), [("url", "http://me:s3cret@host"), ("token_env", "s3cret-token")])
def test_a_secret_is_refused_without_repeating_it(setting: str, value: str) -> None:
    cause: BaseException | None = refused(build_reward, "remote", {**NEEDED["remote"], setting: value})
    assert "environment variable" in str(cause)
    shown = []
    while cause is not None:
        shown.append(str(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    assert "s3cret" not in " ".join(shown)


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("sim", {}, ("rewards", "sim", "ssim?")),
        ("clip", {}, ("rewards", "clip", "clip_score")),
        ("zzz", {}, ("rewards", "zzz", "remote")),
        ("jpeg", {"qualty": 3}, ("rewards.jpeg", "qualty", "quality?")),
        ("lpips", {"weight": "x"}, ("rewards.lpips", "weight", "weights or weights_sha256?")),
        ("ssim", {"window": 7}, ("rewards.ssim", "window", "")),
        # Fixed properties of a reward are no settings.
        ("jpeg", {"version": "2"}, ("rewards.jpeg", "version", "")),
        ("jpeg", {"needs_target": True}, ("rewards.jpeg", "needs_target", "")),
    ],
)
def test_wrong_names_and_settings_are_told_with_the_nearest(
    name: str, settings: Mapping[str, object], named: tuple[str, object, str]
) -> None:
    error = refused(build_reward, name, settings)
    assert (error.place, error.value) == named[:2]
    assert named[2] in error.hint


GATE = {"role": "gate"}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("weight", {"weight": math.nan}),
        ("weight", {"weight": -math.inf}),
        ("role", {"role": "product"}),
        ("normalize", {"normalize": "batch"}),
        ("threshold", {"threshold": 0.5}),
        ("clamp", {"clamp": (1.0, 0.0)}),
        ("clamp", {"clamp": (0.5, 0.5)}),
        ("clamp.1", {"clamp": (0.0, math.inf)}),
        ("clamp.0", {"clamp": (math.nan, 1.0)}),
        ("range", {"normalize": "range"}),
        ("range", {"range": (0.0, 1.0)}),
        ("range", {"normalize": "group", "range": (0.0, 1.0)}),
        ("range", {"normalize": "range", "range": (1.0, 1.0)}),
        ("range.1", {"normalize": "range", "range": (0.0, math.nan)}),
        ("weight", {**GATE, "weight": 0.0}),
        ("weight", {**GATE, "weight": 2.0}),
        ("normalize", {**GATE, "normalize": "group"}),
        ("normalize", {**GATE, "normalize": "running"}),
        ("threshold", {**GATE, "threshold": math.nan}),
        ("clamp", {**GATE, "threshold": 0.5, "clamp": (0.0, 1.0)}),
        ("range", {**GATE, "threshold": 0.5, "normalize": "range", "range": (0.0, 1.0)}),
    ],
)
def test_a_wrong_term_is_refused(field: str, options: dict[str, Any]) -> None:
    place, value = refusal(RewardTerm, **options)
    assert place == f"rewards.{field}"
    if "." not in field:
        assert str(value) == str(options.get(field))


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({"weight": -2.5}, [-3.5, 0.1, 70.0], [-3.5, 0.1, 70.0]),
        # The advantages normalise by group and by running moments.
        ({"normalize": "group"}, [1.0, 9.0], [1.0, 9.0]),
        ({"normalize": "running", "clamp": (-1.0, 5.0)}, [-2.0, 0.3, 6.0], [-1.0, 0.3, 5.0]),
        # (x - 20) / 40: decibels from 20 to 60, and beyond.
        ({"normalize": "range", "range": (20.0, 60.0)}, [20.0, 60.0, 30.0, 10.0, 80.0], [0.0, 1.0, 0.25, -0.25, 1.5]),
        # The clamp is in the unit of the value: 10 becomes 20, which is 0; 80 becomes 50, which is 3/4.
        ({"clamp": (20.0, 50.0), "normalize": "range", "range": (20.0, 60.0)}, [10.0, 80.0], [0.0, 0.75]),
        (GATE, [-0.5, 0.0, 0.25, 1.5], [0.0, 0.0, 0.25, 1.5]),
        ({**GATE, "normalize": "range", "range": (0.5, 1.0)}, [0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.5, 1.0]),
        ({**GATE, "threshold": 0.5}, [-4.0, 0.499, 0.5, 9.0], [0.0, 0.0, 1.0, 1.0]),
    ],
)
def test_scaled_by_hand(options: dict[str, Any], values: list[float], expected: list[float]) -> None:
    column = torch.tensor(values, dtype=torch.float64).unsqueeze(-1)
    assert scaled_values(column, [RewardTerm(**options)]).squeeze(-1).tolist() == expected


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.7, 0.9])
def test_a_score_of_fp32_passes_the_threshold_that_it_equals(threshold: float) -> None:
    """.7 of fp32 is .699999988."""
    stored = float(torch.tensor(threshold, dtype=torch.float32))
    values = torch.tensor([[stored], [threshold], [threshold - 1e-6]], dtype=torch.float64)
    term = RewardTerm(role="gate", threshold=threshold)
    assert scaled_values(values, [term]).flatten().tolist() == [1.0, 1.0, 0.0]


def test_a_null_stays_one_and_each_reward_has_its_own_term() -> None:
    terms = [RewardTerm(2.0), RewardTerm(clamp=(0.0, 1.0)), RewardTerm(normalize="range", range=(0.0, 4.0))]
    terms += [RewardTerm(role="gate"), RewardTerm(role="gate", threshold=0.5)]
    found = scaled_values(torch.tensor([[math.nan] * 5, [3.0] * 5, [-1.0] * 5]), terms)
    assert found[0].isnan().all()
    assert found[1:].tolist() == [[3.0, 1.0, 0.75, 3.0, 1.0], [-1.0, 0.0, -0.25, 0.0, 0.0]]
