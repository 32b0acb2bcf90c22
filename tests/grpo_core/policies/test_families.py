"""What every kind of policy promises of a model's folder: what is refused, what is built, what is read again."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, T5Config

from grpo_core.errors import InputError
from grpo_core.policies.causal_lm.settings import CausalLMSettings
from grpo_core.policies.diffusers.saved_pipeline import DiffusersSettings
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.policies.vision_lm.settings import VisionLMSettings
from tests.grpo_core.policies.vision_lm.tiny_families import template
from tests.tiny_policies import MODEL, TEXT_MODEL, VISION_MODEL

CPU = torch.device("cpu")
MODELS = {
    "glm_image": MODEL,
    "diffusers": MODEL.with_name("tiny-sd3"),
    "causal_lm": TEXT_MODEL,
    "vision_lm": VISION_MODEL,
}
SIZE: Any = {"height": 64, "width": 64, "num_inference_steps": 4, "guidance_scale": 4.0, "sde_window_range": (1, 3)}
SETTINGS: Mapping[str, Any] = {
    "glm_image": GlmImageSettings(**SIZE),
    "diffusers": DiffusersSettings(**SIZE, negative_prompt="blur"),
    "causal_lm": CausalLMSettings(stop=("a", "é"), system_prompt="be short"),
    "vision_lm": VisionLMSettings(stop=("a", "é"), max_pixels=4096),
}
EVERY_KIND = pytest.mark.parametrize("kind", MODELS)
STREAMS = [(kind, stream) for kind in MODELS for stream in policy_family(kind).streams]


def load(kind: str, model: Path | str, **lora: Any) -> Any:
    choices = {policy_family(kind).streams[0]: TrainingChoice(LoraSettings(rank=2, **lora))}
    return (
        policy_family(kind)
        .policy_class()
        .load(str(model), SETTINGS[kind], choices, dtype=torch.float32, device=CPU, autocast=None)
    )


@EVERY_KIND
def test_settings_come_from_sections_and_from_stored_rows(kind: str) -> None:
    """A table keeps tuples as lists, and the stop texts as JSON."""
    section = asdict(SETTINGS[kind]) | {"group_size": 8}
    row = {name: list(each) if isinstance(each, tuple) else each for name, each in section.items()}
    row |= {"stop": json.dumps(section["stop"])} if "stop" in section else {}
    for values in (section, row):
        assert policy_family(kind).settings(values) == SETTINGS[kind]


@EVERY_KIND
@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nothing", "~/nothing-at-all", "a/b/c", "data/models/none"])
def test_a_folder_that_is_not_there_is_refused(kind: str, name: str) -> None:
    for refuse in (policy_family(kind).refuse_missing, lambda model: load(kind, model)):
        with pytest.raises(InputError, match="folder") as refused:
            refuse(name)
        assert (refused.value.place, refused.value.value) == ("policy.model", name)


@EVERY_KIND
def test_a_hub_name_passes_until_it_is_loaded(kind: str) -> None:
    policy_family(kind).refuse_unusable("nobody/has-this", SETTINGS[kind])
    with pytest.raises(InputError) as refused:
        load(kind, "nobody/has-this")
    assert (refused.value.place, refused.value.value) == ("policy.model", "nobody/has-this")


Change = Callable[[Path], object]


def removed(pattern: str) -> Change:
    """Remove a folder, or the files that match."""

    def change(folder: Path) -> None:
        for path in [*folder.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def written(file: str, text: str) -> Change:
    return lambda folder: (folder / file).write_text(text)


def updated(file: str, **values: Any) -> Change:
    """Change values of a JSON file."""
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))


INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
TEMPLATE, OF_TEMPLATE = "chat_template.jinja", "rollout.chat_template"
BLIND = "{% for each in messages %}{% for block in each['content'] %}{{ block['text'] }}{% endfor %}{% endfor %}"
HEUN, STOCHASTIC = "FlowMatchHeunDiscreteScheduler", {"stochastic_sampling": True}
# What is done to the folder of the tiny model of a kind, and what the hint names.
UNUSABLE: dict[str, tuple[str, Change, str]] = {
    "no configuration": ("causal_lm", removed("config.json"), "config.json"),
    "no JSON": ("causal_lm", written("config.json", "{"), "configuration"),
    "nothing in it": ("causal_lm", written("config.json", "{}"), "configuration"),
    "an unknown type": ("causal_lm", written("config.json", '{"model_type": "unheard of"}'), "configuration"),
    "a value of another type": ("causal_lm", updated("config.json", vocab_size="a"), "configuration"),
    "an encoder": ("causal_lm", BertConfig(architectures=["BertModel"]).save_pretrained, "BertModel"),
    "an encoder and a decoder": ("causal_lm", T5Config().save_pretrained, "t5"),
    "no tokenizer": ("causal_lm", removed("tokenizer*"), "tokenizer"),
    "no processor": ("vision_lm", removed("*processor_config.json"), "processor"),
    "noise of its scheduler": ("glm_image", updated(SCHEDULER, **STOCHASTIC), "stochastic_sampling"),
    "another scheduler": ("glm_image", updated(SCHEDULER, _class_name="DDIMScheduler"), "DDIMScheduler"),
    "no token model": ("glm_image", removed("vision_language_encoder/*.safetensors"), "vision_language_encoder"),
    "no decoder": ("glm_image", removed("transformer/*.safetensors"), "diffusion_pytorch_model"),
    "no glyph encoder": ("glm_image", removed("text_encoder"), "text_encoder"),
    "an image as its input": ("diffusers", updated(INDEX, _class_name="FluxImg2ImgPipeline"), "FluxImg2ImgPipeline"),
    "code of its own": ("diffusers", updated(INDEX, _class_name=["own_code", "OwnPipeline"]), "OwnPipeline"),
    "a scheduler of another kind": ("diffusers", updated(INDEX, scheduler=["diffusers", HEUN]), HEUN),
    "no transformer": ("diffusers", updated(INDEX, transformer=[None, None]), "no transformer"),
    "noise in a pipeline's scheduler": ("diffusers", updated(SCHEDULER, **STOCHASTIC), "stochastic_sampling"),
    "an inverted scheduler": ("diffusers", updated(SCHEDULER, invert_sigmas=True), "invert_sigmas"),
    "a damaged file": ("diffusers", written("vae/config.json", "{"), "vae/config.json"),
    "a part without its folder": ("diffusers", removed("tokenizer"), "tokenizer"),
    "a template without images": ("vision_lm", written(TEMPLATE, BLIND), "0 of 1 images"),
    "another placeholder": ("vision_lm", written(TEMPLATE, template("<|im_start|>")), "0 of 1"),
    "a template of texts": ("vision_lm", written(TEMPLATE, "{{ 'user:' + messages[0]['content'] }}"), "refuses"),
}
PLACES = {"a template without images": OF_TEMPLATE, "another placeholder": OF_TEMPLATE, "a template of texts": "prompt"}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_folder_is_refused_before_its_weights_are_opened(case: str, tmp_path: Path) -> None:
    kind, change, named = UNUSABLE[case]
    folder = Path(shutil.copytree(MODELS[kind], tmp_path / "model"))
    change(folder)
    with pytest.raises(InputError) as refused:
        policy_family(kind).refuse_unusable(str(folder), SETTINGS[kind])
    assert (refused.value.place, named in refused.value.hint) == (PLACES.get(case, "policy.model"), True)
    assert case in PLACES or refused.value.value == str(folder)


@EVERY_KIND
def test_the_tiny_model_of_each_kind_passes(kind: str) -> None:
    policy_family(kind).refuse_missing(str(MODELS[kind]))
    policy_family(kind).refuse_unusable(str(MODELS[kind]), SETTINGS[kind])


# Without a file or folder, or with the first bytes of a file alone.
DAMAGE: Mapping[str, tuple[tuple[str, int | None], ...]] = {
    "glm_image": (
        ("model_index.json", None),
        ("processor", None),
        ("vision_language_encoder/model.safetensors", None),
        ("model_index.json", 40),
        ("vae/config.json", 40),
        ("vision_language_encoder/model.safetensors", 4),
        ("vision_language_encoder/model.safetensors", 100_000),
    ),
    "diffusers": (
        ("model_index.json", 40),
        ("transformer/config.json", 40),
        ("transformer/diffusion_pytorch_model.safetensors", None),
        ("text_encoder/model.safetensors", 5000),
    ),
    "causal_lm": (
        ("config.json", 1),
        ("tokenizer.json", 40),
        ("model.safetensors", None),
        ("model.safetensors", 5000),
    ),
    "vision_lm": (("config.json", 1), ("model.safetensors", None), ("model.safetensors", 5000)),
}


@pytest.mark.parametrize(("kind", "path", "kept"), [(kind, *each) for kind, cases in DAMAGE.items() for each in cases])
def test_a_damaged_folder_is_refused(kind: str, path: str, kept: int | None, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODELS[kind], tmp_path / "model"))
    content = (folder / path).read_bytes() if kept is not None else b""
    removed(path)(folder)
    if kept is not None:
        (folder / path).write_bytes(content[:kept])
    with pytest.raises(InputError) as refused:
        load(kind, folder)
    assert (refused.value.place, refused.value.value) == ("policy.model", str(folder))


@EVERY_KIND
def test_targets_that_match_nothing_are_refused_before_weights_are_read(kind: str) -> None:
    family, model = policy_family(kind), str(MODELS[kind])
    stream = family.streams[0]
    with pytest.raises(InputError) as refused:
        family.check_choices(model, {stream: TrainingChoice(LoraSettings(targets="no_such_layer"))})
    assert refused.value.place == "policy.lora.targets"
    assert family.check_choices(model, {stream: TrainingChoice(LoraSettings())}) == ()


@pytest.mark.parametrize(("kind", "stream"), STREAMS)
def test_the_meta_device_has_every_parameter_of_the_files(kind: str, stream: Any) -> None:
    family, model = policy_family(kind), str(MODELS[kind])
    built, stored = (
        family.build_on_meta(model, family.trained[stream]),
        family.load_network(model, stream, torch.float32),
    )
    assert {name: value.shape for name, value in built.named_parameters()} == {
        name: value.shape for name, value in stored.named_parameters()
    }


@EVERY_KIND
def test_what_is_loaded_has_the_weights_of_the_files(kind: str) -> None:
    stream = policy_family(kind).streams[0]
    stored = policy_family(kind).load_network(str(MODELS[kind]), stream, torch.float32).state_dict()
    loaded = load(kind, MODELS[kind]).components[stream].trained.model.get_base_model().state_dict()
    base = {name.replace(".base_layer", ""): value for name, value in loaded.items() if ".lora_" not in name}
    assert base.keys() == stored.keys()
    assert all(torch.equal(base[name], value) for name, value in stored.items())
