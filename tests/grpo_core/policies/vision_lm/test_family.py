"""A folder of a vision-language model: what is refused before its weights are opened, trained, stored and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.errors import InputError
from grpo_core.parity import ParityError
from grpo_core.policies.causal_lm.family import FAMILY as TEXTS
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.policies.vision_lm.family import FAMILY
from grpo_core.policies.vision_lm.policy import VisionLMPolicy
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from grpo_core.rollouts.records import GroupRequest
from grpo_core.rollouts.streams import ImageSize
from grpo_core.update.optimizer import OptimizerSettings, PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import UpdateSettings
from tests.grpo_core.policies.trained.tiny_models import disturb
from tests.grpo_core.policies.vision_lm.tiny_families import (
    KINDS,
    OTHERS,
    PROMPTS,
    SOURCES,
    difference,
    drawn,
    make_model,
    make_policy,
)
from tests.tiny_policies import TEXT_MODEL

SETTINGS = VisionLMSettings(max_completion_length=6)
LORA = {"tokens": TrainingChoice(LoraSettings(rank=4, alpha=8.0))}
FULL = {"tokens": TrainingChoice(None)}
# peft reads an attribute of transformers by its previous name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def saved(kind: str, folder: Path) -> Path:
    model, processor = make_model(kind)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved("qwen3_vl", tmp_path / "model")


# --- refused


def refused(model: Path, settings: VisionLMSettings = SETTINGS) -> InputError:
    with pytest.raises(InputError) as caught:
        FAMILY.refuse_unusable(str(model), settings)
    return caught.value


def test_a_text_model_is_refused_and_refuses_images() -> None:
    assert "not a vision-language model" in refused(TEXT_MODEL).hint
    with pytest.raises(InputError, match="vision_lm"):
        TEXTS.refuse_prompts(str(TEXT_MODEL), CausalLMSettings(), ["a"], [[ImageSize(8, 8)]])


def test_prompts_that_the_model_cannot_read_are_refused_with_their_images(folder: Path) -> None:
    large, small = ImageSize(640, 480), ImageSize(64, 64)
    settings = VisionLMSettings(max_completion_length=900)
    FAMILY.refuse_prompts(str(folder), settings, list(PROMPTS), [[small], [small, small], [small], []])
    cases: dict[str, tuple[str, list[ImageSize], str]] = {
        "longer than the context with its images": ("What?", [large, large], "of its images"),
        "more marks than images": ("<image> or <image>?", [small], "names 2 images, and has 1"),
        "a placeholder in its text": ("a <|image_pad|>", [small], "<|image_pad|>"),
        "longer than the context": ("a" * 200, [], "leave room"),
    }
    for name, (prompt, sizes, named) in cases.items():
        with pytest.raises(InputError, match="prompt") as caught:
            FAMILY.refuse_prompts(str(folder), settings, ["fine", prompt], [[], sizes])
        assert named in caught.value.hint, name


def test_more_images_than_the_context_has_room_for_are_refused(folder: Path) -> None:
    settings = VisionLMSettings(max_completion_length=6)
    FAMILY.refuse_prompts(str(folder), settings, ["Compare!"], [[ImageSize(256, 256)] * 14])
    with pytest.raises(InputError, match="of its images"):
        FAMILY.refuse_prompts(str(folder), settings, ["Compare!"], [[ImageSize(256, 256)] * 16])


def test_among_many_sizes_those_of_most_pixels_are_processed(folder: Path) -> None:
    """More sizes than are processed, all of them wider for their height than the large ones."""
    strips = [[ImageSize(1600 + 2 * each, 32)] for each in range(70)]
    with pytest.raises(InputError, match="of its images"):
        FAMILY.refuse_prompts(str(folder), SETTINGS, ["What?"] * 71, [*strips, [ImageSize(256, 256)] * 16])


def test_a_completion_as_long_as_the_context_is_refused(folder: Path) -> None:
    assert refused(folder, VisionLMSettings(max_completion_length=1024)).place == "rollout.max_completion_length"


# --- loaded, trained, stored


# Stored names like a folder's own and others, tied weights, and a projector that is one parameter.
QUICK = {"qwen3_vl", "llava", "gemma3"}


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in KINDS]
)
def test_a_folder_is_loaded_stored_and_exported(kind: str, tmp_path: Path) -> None:
    """The export is loaded by transformers alone, and has the log-probs of the policy."""
    folder = saved(kind, tmp_path / "model")
    choices = LORA if kind in ("qwen2_vl", "gemma3", "smolvlm", "internvl", "paligemma") else FULL
    FAMILY.refuse_unusable(str(folder), SETTINGS)
    policy = VisionLMPolicy.load(str(folder), SETTINGS, choices)
    disturb(policy.trainable_parameters(), 0.05)
    sampled = drawn(policy, kind)
    policy.save_weights(tmp_path / "weights")
    again = VisionLMPolicy.load(str(folder), SETTINGS, choices)
    assert difference(again, sampled) > 1e-3
    again.load_weights(tmp_path / "weights")
    assert difference(again, sampled) < 1e-5
    exported = tmp_path / "exported"
    exported.mkdir()
    FAMILY.save_whole(folder, {"tokens": tmp_path / "weights"}, exported, dtype=torch.float32)
    model = AutoModelForImageTextToText.from_pretrained(exported)
    processor = AutoProcessor.from_pretrained(exported)
    assert processor.chat_template == policy.processor.chat_template
    whole = make_policy(kind, SETTINGS, TrainingChoice(None), disturbed=0)
    whole._model.load_state_dict(model.state_dict())
    assert difference(whole, sampled) < 1e-5


@pytest.mark.parametrize(("kind", "freeze"), [("qwen3_vl", True), ("llava", False)])
def test_an_update_trains_a_policy_and_its_gate_names_a_row_with_another_image(kind: str, freeze: bool) -> None:
    """In LLaVA nothing reads the encoder's last layer, which gets no gradient."""
    policy = make_policy(kind, choice=TrainingChoice(None, freeze_vision=freeze, reference="device"), disturbed=0)
    requests = [
        GroupRequest(prompt, (f"{place}-a", f"{place}-b"), (2 * place, 2 * place + 1), (0, 0), sources=images)
        for place, (prompt, images) in enumerate(zip(PROMPTS, SOURCES, strict=True))
    ]
    groups = list(collect_rollouts(policy, requests, prompts_per_batch=3))
    assert [group.streams["tokens"].actions.sources for group in groups][:1] == [(SOURCES[0],) * 2]
    rows = join_groups(groups, torch.tensor([[1.0, -1.0]] * len(PROMPTS)))
    settings = UpdateSettings(micro_batch_size=3, kl_coef=0.1)
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(1e-3))
    swapped = (OTHERS[0], *rows.actions.sources[1:])
    actions: Any = rows.actions
    wrong = type(rows)(**{**vars(rows), "actions": type(actions)(**{**vars(actions), "sources": swapped})})
    with pytest.raises(ParityError, match="worst samples: 0-a"):
        update_policy(policy, optimizer, wrong, settings, seed=0)
    before = {name: each.detach().clone() for name, each in policy._model.named_parameters()}
    update_policy(policy, optimizer, rows, settings, seed=0)
    changed = {name for name, each in policy._model.named_parameters() if not torch.equal(each, before[name])}
    assert any("vision_tower" in name or "visual" in name for name in changed) == (not freeze)
    assert any("language_model" in name for name in changed)


# --- counted


@pytest.mark.parametrize("kind", ["qwen2_5_vl", pytest.param("idefics3", marks=pytest.mark.slow), "gemma3"])
def test_sizes_count_the_model_and_what_is_trained(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path / "model")
    model, _ = make_model(kind)
    total = sum(each.numel() for each in model.parameters())
    for choice in (LORA["tokens"], TrainingChoice(LoraSettings(rank=4), freeze_vision=False), TrainingChoice(None)):
        with torch.device("meta"):
            sizes = FAMILY.sizes(str(folder), SETTINGS, {"tokens": choice}, ())
        assert sizes.networks == {"weights": total}
        assert (sizes.components["tokens"].encoder_values > 0) == (not choice.freeze_vision)
    assert FAMILY.check_choices(str(folder), LORA) == ()
    left_out = FAMILY.check_choices(str(folder), {"tokens": TrainingChoice(LoraSettings(rank=4), freeze_vision=False)})
    # Convolutions, tables of positions, and a projector that is one parameter.
    assert len(left_out) == 1
    assert json.dumps(left_out).count("patch_embed") >= 1
