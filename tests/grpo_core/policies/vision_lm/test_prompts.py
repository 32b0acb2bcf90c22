"""Prompts with images: where they stand, how large they are, and what is no prompt."""

import json

import pytest
import torch
from PIL import Image

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.prompts import image_messages
from grpo_core.policies.encoded_prompts import EncodedPrompt, ImageFeatures, RecentlyUsed
from grpo_core.policies.vision_lm.prompts import find_placeholders, image_sizes, print_prompt, process_prompt
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from tests.grpo_core.policies.vision_lm.tiny_families import KINDS, build, make_policy, source

IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def stored(*contents: object) -> str:
    return json.dumps([{"role": "user", "content": content} for content in contents])


READ: dict[str, tuple[str, int, list[list[dict[str, str]]]]] = {
    "no mark": ("where?", 2, [[IMAGE, IMAGE, text("where?")]]),
    "marks": ("<image> or\n<image>?", 2, [[IMAGE, text(" or\n"), IMAGE, text("?")]]),
    "marks in the middle": ("a<image>b", 1, [[text("a"), IMAGE, text("b")]]),
    "no image": ("where?", 0, [[text("where?")]]),
    "messages of texts": (stored("a", "b"), 1, [[IMAGE, text("a")], [text("b")]]),
    "messages of blocks": (stored([text("a"), IMAGE], "b"), 1, [[text("a"), IMAGE], [text("b")]]),
    "messages without image blocks": (stored([text("a")]), 1, [[IMAGE, text("a")]]),
    "JSON that is no conversation": ('[{"a": 1}]', 1, [[IMAGE, text('[{"a": 1}]')]]),
}


@pytest.mark.parametrize("case", READ)
def test_images_stand_where_the_prompt_has_them(case: str) -> None:
    prompt, images, expected = READ[case]
    assert [message["content"] for message in image_messages(prompt, images)] == expected


def test_images_come_before_the_first_words_of_the_user() -> None:
    prompt = json.dumps([{"role": "system", "content": "be short"}, {"role": "user", "content": "where?"}])
    assert [message["content"][0] for message in image_messages(prompt, 1)] == [text("be short"), IMAGE]


@pytest.mark.parametrize(
    ("prompt", "images"), [("<image>?", 2), ("<image><image>", 1), (stored([IMAGE, IMAGE]), 1), (stored([IMAGE]), 0)]
)
def test_another_number_of_images_is_refused(prompt: str, images: int) -> None:
    with pytest.raises(InputError, match=f"has {images}"):
        image_messages(prompt, images)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_are_those_of_the_processor_with_the_system_prompt(kind: str) -> None:
    config, processor = build(kind)
    settings = VisionLMSettings(system_prompt="be short")
    image = Image.new("RGB", (84, 56), "red")
    found = process_prompt(processor, settings, "where?", [image], find_placeholders(config, processor))
    printed = print_prompt(processor, settings, "where?", 1)
    assert printed.startswith("system:be short;user:")
    assert printed.endswith("where?;assistant:")
    (features,) = make_policy(kind).encode(["where?"], [(source(84, 56, 1),)]).features
    assert features is not None
    pooled = features.pooled.flatten(0, 1) if isinstance(features.pooled, torch.Tensor) else torch.cat(features.pooled)
    assert found.ids.count(config.image_token_id) == len(pooled)


BOUNDS = {"qwen2_vl": 28, "qwen3_vl": 32, "glm4v": 28}


@pytest.mark.parametrize("kind", BOUNDS)
def test_images_are_scaled_to_the_bounds_of_the_settings(kind: str) -> None:
    """A token is a square of this many pixels a side."""
    config, processor = build(kind)
    area, placeholders = BOUNDS[kind] ** 2, find_placeholders(config, processor)

    def tokens(settings: VisionLMSettings, side: int) -> int:
        processed = process_prompt(processor, settings, "a", [Image.new("RGB", (side, side))], placeholders)
        return processed.ids.count(config.image_token_id)

    large, small = 8 * BOUNDS[kind], BOUNDS[kind]
    assert tokens(VisionLMSettings(), large) == 64
    assert tokens(VisionLMSettings(max_pixels=16 * area), large) == 16
    assert tokens(VisionLMSettings(min_pixels=25 * area), small) == 25
    assert tokens(VisionLMSettings(max_pixels=2 * area), large) <= 2


@pytest.mark.parametrize("kind", ["llava", "idefics3", "gemma3", "internvl", "mistral3"])
def test_a_processor_that_does_not_scale_to_pixels_refuses_bounds(kind: str) -> None:
    with pytest.raises(InputError, match="does not scale images to a number of pixels") as caught:
        image_sizes(build(kind)[1], VisionLMSettings(max_pixels=10_000))
    assert caught.value.place == "rollout.max_pixels"


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(InputError, match="max_pixels is 4"):
        VisionLMSettings(min_pixels=5, max_pixels=4)


def test_a_family_that_reads_no_text_alone_says_so() -> None:
    config, processor = build("paligemma")
    with pytest.raises(InputError, match="with 0 images"):
        process_prompt(processor, VisionLMSettings(), "where?", [], find_placeholders(config, processor))


def test_without_a_template_images_stand_in_the_text() -> None:
    settings = VisionLMSettings(chat_template=False)
    _, processor = build("llava")
    assert print_prompt(processor, settings, "a<image>b", 1) == "a<image>b"
    assert print_prompt(processor, settings, "ab", 2) == "<image><image>ab"
    with pytest.raises(InputError, match="needs a chat template"):
        print_prompt(processor, settings, stored("a"), 1)


def test_what_was_used_last_is_kept_within_the_limit() -> None:
    made: list[str] = []

    def get(name: str, numbers: int = 4) -> None:
        def encode() -> EncodedPrompt:
            made.append(name)
            prompt = EncodedPrompt([1], pixels={"pixel_values": torch.zeros(1000)})
            return prompt.keeping(ImageFeatures((torch.zeros(numbers),)))

        cache.get(name, encode)

    cache = RecentlyUsed[EncodedPrompt](limit=200)
    for name in "abacab":
        get(name)
    # Two fit: c takes the place of b, which was used before a.
    assert made == ["a", "b", "c", "b"]
    get("large", 40)
    assert len(cache) == 1
    get("large", 40)
    assert made[4:] == ["large"]
