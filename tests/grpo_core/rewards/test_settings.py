"""Every wrong setting of every reward, through the registry: the place and the value are named, with a hint."""

import math
import re
from collections.abc import Mapping

import pytest

from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward

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
    | {"threshold": (0, 1.5, math.nan, True, "0.5")},
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
        refuse(name, setting, value)


def refuse(name: str, setting: str, value: object) -> None:
    with pytest.raises(InputError) as error:
        build_reward(name, {**NEEDED.get(name, {}), setting: value})
    assert error.value.place == f"rewards.{name}.{setting}"
    if setting != "token_env" and value == value:
        assert error.value.value == value
    assert error.value.hint.endswith((".", ")", "?"))


@pytest.mark.parametrize(
    ("name", "settings", "place"),
    [
        ("format", {"pattern": "a", "format": "think_answer"}, "pattern"),
        ("format", {"pattern": "a", "mode": "partial"}, "mode"),
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
    with pytest.raises(InputError) as error:
        build_reward(name, settings)
    assert error.value.place == f"rewards.{name}.{place}"


@pytest.mark.parametrize(("setting", "value"), [("url", "http://me:s3cret@host"), ("token_env", "s3cret-token")])
def test_a_secret_is_refused_without_repeating_it(setting: str, value: str) -> None:
    with pytest.raises(InputError) as error:
        build_reward("remote", {**NEEDED["remote"], setting: value})
    assert re.search("environment variable", error.value.hint)
    shown, cause = [], error.value
    while cause is not None:
        shown.append(str(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)  # type: ignore[assignment]
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
    with pytest.raises(InputError) as caught:
        build_reward(name, settings)
    assert (caught.value.place, caught.value.value) == named[:2]
    assert named[2] in caught.value.hint
