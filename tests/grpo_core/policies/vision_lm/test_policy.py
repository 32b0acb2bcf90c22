"""A vision-language model: gradients of a plain script, features computed once; where the images of a prompt stand."""

import copy
import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from PIL import Image

from grpo_core.errors import InputError, NonFiniteError
from grpo_core.parity import ParityError, ParityTolerance, measure_parity, require_parity
from grpo_core.policies.causal_lm.loading import train_language_model
from grpo_core.policies.causal_lm.prompts import image_messages
from grpo_core.policies.encoded_prompts import EncodedPrompt, ImageFeatures, RecentlyUsed
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.policies.vision_lm.loading import VISION_LM, language_parameters
from grpo_core.policies.vision_lm.policy import VisionLMPolicy
from grpo_core.policies.vision_lm.prompts import find_placeholders, image_sizes, print_prompt, process_prompt
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.rollouts.actions import Sources
from grpo_core.rollouts.records import SampledTokens
from tests.grpo_core.policies.vision_lm.tiny_families import (
    KINDS,
    OTHERS,
    build,
    drawn,
    make_model,
    make_policy,
    plain_logprobs,
    source,
)

LORA = TrainingChoice(LoraSettings(rank=2, alpha=4.0))
FULL = TrainingChoice(None, freeze_vision=False)


def gradients(policy: VisionLMPolicy) -> dict[str, torch.Tensor]:
    found = {name: each.grad for name, each in policy._model.named_parameters() if each.grad is not None}
    policy._model.zero_grad()
    return {name: each.clone() for name, each in found.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in found.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(each, expected[name], rtol=1e-3, atol=1e-4 * max(scale, 1e-2), msg=name)


def test_features_behind_a_layer_are_added_to_the_bit_as_by_transformers() -> None:
    (text,) = (each for each in make_policy("qwen3_vl")._model.modules() if hasattr(each, "_deepstack_process"))
    places = torch.tensor([[False, True, True, False, True], [False, False, False, False, True]])
    values = [torch.randn(2, 5, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)]
    found = text._deepstack_process(values[0], places, values[1])
    expected = type(text)._deepstack_process(text, values[0], places, values[1])
    assert torch.equal(found, expected)
    upstream = torch.randn(2, 5, 8)
    assert all(map(torch.equal, *(torch.autograd.grad(each, values, upstream) for each in (found, expected))))


# With deepstack, with a projector that is one parameter, with a layer that nothing reads, and with tiles.
QUICK = ("qwen3_vl", "gemma3", "llava", "internvl")
BY_KIND = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        *(
            pytest.param(kind, LORA, id=f"{kind}-adapters", marks=pytest.mark.slow if kind in QUICK[1:] else ())
            for kind in KINDS
        ),
        *(
            pytest.param(kind, FULL, id=f"{kind}-all", marks=() if kind in QUICK else pytest.mark.slow)
            for kind in KINDS
        ),
    ],
)
def test_gradients_are_those_of_a_plain_script(kind: str, choice: TrainingChoice) -> None:
    """It runs each row alone, with its pixels, through the model's own forward pass."""
    policy = make_policy(kind, choice=choice)
    actions = drawn(policy, kind, group_size=2).actions
    policy.prepare_for_update()
    weights = torch.linspace(-1, 1, actions.token_ids.numel()).view_as(actions.token_ids) * actions.loss_mask
    (policy.logprobs(actions).logprobs * weights).sum().backward()
    found = gradients(policy)
    for row in range(len(actions)):
        plain = plain_logprobs(policy, actions, row)
        (plain * weights[row, : len(plain)]).sum().backward()
    assert_same(found, gradients(policy))
    language = language_parameters(policy._model)
    outside = {name for name, each in policy._model.named_parameters() if id(each) not in language}
    assert bool(outside & found.keys()) == (choice is FULL)


@pytest.mark.parametrize("kind", BY_KIND)
def test_features_are_computed_once_and_give_the_gradients_of_those_of_every_pass(kind: str) -> None:
    policy = make_policy(kind, choice=LORA)
    calls = count_features(policy)
    actions = drawn(policy, kind).actions
    assert len(calls) == 3
    found = []
    for once in (True, False):
        policy.vision_frozen = once
        policy._prompts.clear()
        calls.clear()
        for _ in range(2):
            policy.logprobs(actions).logprobs.sum().backward()
        policy.logprobs(actions.select([4, 0, 3])).logprobs.sum().backward()
        assert len(calls) == (3 if once else 3 + 3 + 2)
        found.append(gradients(policy))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(each, found[1][name]) for name, each in found[0].items())


def count_features(policy: VisionLMPolicy) -> list[Any]:
    calls: list[Any] = []
    body, compute = policy._model.base_model, policy._model.base_model.get_image_features

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(named)
        return compute(*arguments, **named)

    body.get_image_features = counted
    return calls


@pytest.mark.parametrize("kind", BY_KIND)
def test_adapters_are_in_the_language_model_alone_unless_asked_for(kind: str) -> None:
    model, _ = make_model(kind)
    fresh = {True: copy.deepcopy(model), False: copy.deepcopy(model)}
    decoder = next(name for name, module in model.named_modules() if module is model.get_decoder())
    linears = {name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    expected = {name for name in linears if name.startswith(f"{decoder}.")}
    for frozen in (True, False):
        choice = TrainingChoice(LoraSettings(rank=2), freeze_vision=frozen)
        names = train_language_model(fresh[frozen], choice, VISION_LM, base_name=kind).trainable_parameters()
        adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in names}
        assert adapted == expected if frozen else adapted > expected


def test_targets_in_frozen_vision_are_refused() -> None:
    model, _ = make_model("llava")
    with pytest.raises(InputError, match="freeze_vision") as caught:
        train_language_model(model, TrainingChoice(LoraSettings(targets=r".*\.q_proj")), VISION_LM, base_name="llava")
    assert caught.value.place == "policy.lora.targets"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])
def test_without_adapters_frozen_vision_keeps_its_weights(kind: str) -> None:
    policy = make_policy(kind, choice=TrainingChoice(None, reference="device"))
    assert policy.vision_frozen
    language = language_parameters(policy._model)
    assert {id(each) for each in policy.trainable_parameters().values()} <= language
    sampled = drawn(policy, kind)
    with torch.no_grad():
        reference = policy.reference_logprobs(sampled.actions)
        again = policy.logprobs(sampled.actions).logprobs
    # The policy was disturbed, its reference was not.
    assert float((reference - again).abs().max()) > 1e-3
    assert float((again - sampled.rollout_logprobs).abs().max()) < 1e-5


@cache
def sampled_by(kind: str) -> tuple[VisionLMPolicy, SampledTokens]:
    """A policy of a family with what it drew; never changed."""
    policy = make_policy(kind)
    return policy, drawn(policy, kind)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "llava_onevision"])
def test_the_gate_refuses_another_image_by_the_sample_s_name(kind: str) -> None:
    policy, sampled = sampled_by(kind)
    actions = sampled.actions
    rows = range(0, len(actions), 3)
    given = [actions.sources[row] for row in rows] if actions.sources else []
    other = OTHERS[: len(given)]
    swapped = (given[0], tuple(reversed(given[1])), *given[2:])
    cases = {"another image": (other[0], *given[1:]), "a swapped pair": swapped}
    for name, sources in cases.items():
        changed: Sources = tuple(each for each in sources for _ in range(3))
        with torch.no_grad():
            wrong = policy.logprobs(replace(actions, sources=changed)).logprobs
        names = [f"{row // 3}-{row % 3}" for row in range(len(actions))]
        report = measure_parity(names, sampled.rollout_logprobs, wrong, actions.loss_mask)
        at = "0" if name == "another image" else "1"
        assert {each[0] for each in report.worst_samples} == {at}, name
        with pytest.raises(ParityError, match=f"worst samples: {at}-"):
            require_parity(report, ParityTolerance())


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3"])
def test_a_stored_placeholder_is_refused(kind: str) -> None:
    policy, sampled = sampled_by(kind)
    placeholder = policy.placeholders.ids[0]
    forged = replace(sampled.actions, token_ids=torch.full_like(sampled.actions.token_ids, placeholder))
    with torch.no_grad():
        found = policy.logprobs(forged).logprobs
    with pytest.raises(NonFiniteError):
        measure_parity(list("abcdefghijkl"), sampled.rollout_logprobs, found, forged.loss_mask)


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
    # The other bound stays the processor's own.
    assert tokens(VisionLMSettings(min_pixels=25 * area), large) == 64
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
