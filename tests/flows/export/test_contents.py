"""What is exported: the model card of each kind of model, and adapters as diffusers alone loads them, to the bit."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

from configs.loader import read_config
from configs.sections import PolicySection
from flows.export.evaluated import evaluation_card
from flows.export.export import write_adapter
from flows.export.model_card import hub_task, model_card
from flows.export.plan import plan_export
from flows.export.usage import DIFFUSERS_FILE, usage
from flows.requests import ExportRequest
from grpo_core.policies.causal_lm.policy import CausalLMPolicy
from grpo_core.policies.denoising.component import DenoisingComponent
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.glm_image.settings import GlmImageSettings
from grpo_core.policies.protocol import Policy
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from tasks.models.initial import model_digest, weights_digest
from tasks.runs.lookup import write_description
from tasks.runs.trust import remember, uses_of
from tasks.storage.schemas import SCHEMA_VERSION
from tests.flows.conftest import REPOSITORY, TINY, TINY_TEXT, refused
from tests.grpo_core.policies.denoising.tiny_pipelines import (
    DECODER_LINEARS,
    MAKE,
    PIPELINES,
    RandomComponent,
    component,
    drafts,
    size_of,
)
from tests.grpo_core.policies.denoising.tiny_pipelines import disturb as disturb_component
from tests.grpo_core.policies.diffusers.tiny_pipelines import save, without
from tests.grpo_core.policies.trained.tiny_models import disturb
from tests.tasks.reports.made_runs import RunMaker
from tests.tiny_policies import MODEL as IMAGE_MODEL
from tests.tiny_policies import TEXT_MODEL

SHIPPED: Mapping[type, tuple[Path, Path]] = {
    CausalLMPolicy: (TEXT_MODEL, TINY_TEXT),
    GlmImagePolicy: (IMAGE_MODEL, TINY),
    DiffusersPolicy: (IMAGE_MODEL.with_name("tiny-sd3"), TINY.with_name("tiny_sd3.yaml")),
}
"""Model and configuration of each kind of policy."""


HALVES = (
    *("policy.train=[tokens, denoising]", "rollout.images_per_sample=2", "rollout.sde_window_range=[0, 3]"),
    *("rollout.num_inference_steps=4", "rollout.guidance_scale=1.5", "update={}"),
)
"""Settings of a run that trains both halves of the image model."""


def both_halves() -> GlmImagePolicy:
    """The image model with a disturbed adapter on each half, with the sampler of HALVES."""
    settings = GlmImageSettings(height=64, width=64, num_inference_steps=4, guidance_scale=1.5)
    choice = TrainingChoice(LoraSettings(4, 8.0))
    policy = GlmImagePolicy.load(str(IMAGE_MODEL), settings, {"tokens": choice, "denoising": choice})
    for each in policy.components.values():
        disturb(each.trainable_parameters(), 0.05)
    return policy


def save_components(policy: Policy, folder: Path, copy: str = "") -> None:
    """Write the trained weights of every component as a version has them, or as a copy of those."""
    for stream, each in policy.components.items():
        own = folder / stream / copy
        own.mkdir(parents=True, exist_ok=True)
        each.save_weights(own)


def store_run(
    root: Path,
    name: str,
    policy: Policy,
    rewards: Mapping[int, float],
    *,
    lora: bool = True,
    average: Policy | None = None,
    settings: Sequence[str] = (),
) -> RunMaker:
    """Store these weights as versions 1 and 2, and evaluations of versions with these mean rewards less 0.5."""
    model, file = SHIPPED[type(policy)]
    texts = isinstance(policy, CausalLMPolicy)
    chosen = "{rank: 4, alpha: 8.0}" if lora else "null"
    overrides = [f"policy.model={model}", f"policy.lora={chosen}"]
    overrides += ["rollout.num_inference_steps=2"] if isinstance(policy, GlmImagePolicy) else []
    config = read_config(file, [f"run.name={name}", *overrides, *settings])
    labels = tuple(section.label for section in config.rewards)
    maker = RunMaker(root, name, modality="text" if texts else "image", labels=labels)
    described = {"name": name, "model_digest": model_digest(str(model)), "schema_version": SCHEMA_VERSION}
    content = yaml.safe_dump(config.model_dump(mode="json")).encode()
    write_description(maker.store, described, content)
    # As the training that made it would have done.
    remember(uses_of(config))
    digests = {0: described["model_digest"]}
    for version in (1, 2):
        with maker.store.staging() as staged:
            save_components(policy, staged)
            if average is not None:
                save_components(average, staged, "ema")
            digests[version] = weights_digest(staged)
            state = {"policy_version": version, "policy_digest": digests[version]}
            (staged / "training_state.json").write_text(json.dumps(state))
            maker.commit(staged, f"policies/{version:06d}", 1.0, {})
    for version, shift in rewards.items():
        maker.policy = (version, str(digests[version]))
        maker.evaluation(version, shift=shift)
    return maker


MODEL_DIGEST = "base" * 16
OWN = {"reward": "answer", "weight": 2.0}
RESCORED = {"rewards": [{"reward": "format", "name": "tidy", "weight": 3.0}]}


def stored(
    root: Path, name: str, *, start: str | None = None, replay: dict[str, Any] | None = None, to: int = 2
) -> None:
    """A text run with policies up to version `to`; evaluated at the version that it starts from, and at the last."""
    maker = RunMaker(root, name, modality="text", labels=("answer",))
    overrides = [f"run.name={name}", f"run.iterations={to}", f"rewards=[{json.dumps(OWN)}]"]
    config = read_config(TINY_TEXT, [*overrides, "policy.lora={rank: 4, alpha: 8.0}"])
    values = {**config.model_dump(mode="json"), **({"replay": replay} if replay is not None else {})}
    described: dict[str, Any] = {"name": name, "model_digest": MODEL_DIGEST, "schema_version": SCHEMA_VERSION}
    if start is not None:
        described["start"] = {"from": start, "policy": {"version": 0, "digest": "c" * 64}}
    write_description(maker.store, described, yaml.safe_dump(values).encode())
    remember(uses_of(config))
    first = (replay or {}).get("policy", 0)
    for version in range(first + 1, to + 1):
        maker.update(version)
    before = f"{first:064d}" if first else "c" * 64 if start is not None else MODEL_DIGEST
    for version, digest, shift in ((first, before, -0.25), (to, f"{to:064d}", 0.25)):
        maker.policy = (version, digest)
        maker.evaluation(version, shift=shift)


def replayed(advantages: str, policy: int = 0) -> dict[str, Any]:
    return {"source": "own", "policy": policy, "iterations": [1, 2], "advantages": advantages, "max_staleness": 4}


def card_of(root: Path, name: str) -> dict[str, str]:
    """The two-column rows of a card: its facts, and the mean rewards before and after as one text."""
    plan = plan_export(ExportRequest(run=name, folder=str(root / "out"), root=str(root)))
    text = model_card(plan, evaluation_card(plan, {}, root))
    return {row[0]: row[1] for row in re.findall(r"^\| ([^|]+) \| (.+) \|$", text, re.MULTILINE)}


# Student's t over the means of two prompts, 0.0333 apart: half the interval is 12.706 * 0.0333 / 2.
HELDOUT = "0.250 (0.022 to 0.445) | 0.750 (0.522 to 0.945)"
PLAIN = {"rewards": "answer (weight 2)", "reward": HELDOUT}
CASES: dict[str, tuple[dict[str, Any], dict[str, str], set[str]]] = {
    "own": ({}, PLAIN, {"replay", "rescored", "started from"}),
    "continued": ({"start": "own@2"}, {**PLAIN, "started from": "`own@2`"}, {"replay", "rescored"}),
    "recomputed": (
        {"replay": replayed("recomputed")},
        {**PLAIN, "replay": "of stored rollouts: iterations 1 to 2 of own, advantages computed again"},
        {"rescored"},
    ),
    "on-mine": (
        {"replay": replayed("mine")},
        {
            "rewards": "tidy (weight 3)",
            "rescored": "rewards of rescoring mine of own",
            "original rewards": "answer (weight 2)",
            "replay": "of stored rollouts: iterations 1 to 2 of own",
            "reward (original rewards)": HELDOUT,
        },
        {"reward", "started from"},
    ),
    "on-gone": (
        {"replay": replayed("gone")},
        {"rewards": "not known: the rescoring is not there", "rescored": "rewards of rescoring gone of own"},
        set(),
    ),
    "from-two": (
        {"replay": replayed("stored", policy=2), "to": 4},
        {**PLAIN, "started from": "`own@2`", "version": "4 of 4 updates"},
        {"rescored"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_card_says_what_trained_the_policy_and_what_it_was_before(name: str, tmp_path: Path) -> None:
    stored(tmp_path, "own")
    (tmp_path / "own/rescored/mine").mkdir(parents=True)
    (tmp_path / "own/rescored/mine/rewards.yaml").write_text(json.dumps(RESCORED))
    options, expected, absent = CASES[name]
    if name != "own":
        stored(tmp_path, name, **options)
    found = card_of(tmp_path, name)
    assert {title: found.get(title) for title in expected} == expected
    assert not absent & found.keys()


def test_a_source_that_is_no_name_of_a_run_is_not_read(tmp_path: Path) -> None:
    """Somebody else's run names a folder of this machine."""
    (tmp_path / "elsewhere/rescored/mine").mkdir(parents=True)
    (tmp_path / "elsewhere/rescored/mine/rewards.yaml").write_text(json.dumps(RESCORED))
    stored(tmp_path / "runs", "theirs", replay={**replayed("mine"), "source": "../elsewhere"})
    assert card_of(tmp_path / "runs", "theirs")["rewards"].startswith("not known")


@pytest.mark.parametrize(
    ("file", "task"),
    [
        ("tiny.yaml", "text-to-image"),
        ("tiny_both.yaml", "text-to-image"),
        ("tiny_sd3.yaml", "text-to-image"),
        ("tiny_edit.yaml", "image-to-image"),
        ("tiny_text.yaml", "text-generation"),
        ("tiny_grounding.yaml", "image-text-to-text"),
        ("flux_kontext.yaml", "image-to-image"),
    ],
)
def test_the_hub_is_given_what_the_model_does(file: str, task: str) -> None:
    assert hub_task(read_config(REPOSITORY / "configs" / file)) == task


@pytest.mark.parametrize("name", ["flux_kontext", "flux2_klein"])
def test_the_lines_of_the_card_edit_an_image(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(name, tmp_path / "pipeline")
    sizes = [
        "rollout.height=32",
        "rollout.width=32",
        "rollout.max_sequence_length=64",
        "evaluate.num_inference_steps=2",
    ]
    own = [f"policy.model={folder}", "policy.dtype=float32", *sizes]
    config = read_config(REPOSITORY / "configs" / "flux_kontext.yaml", own)
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((64, 64), 100).convert("RGB").save("source.png")
    defined: dict[str, Any] = {}
    exec(usage(config, str(folder), merged=True), defined)
    assert defined["image"].size == (32, 32)


def test_a_run_whose_prompts_have_no_images_is_shown_without(tmp_path: Path) -> None:
    folder = save("flux_kontext", tmp_path / "pipeline")
    none = ["data.image_column=null", "evaluate.image_column=null", 'rewards=[{"reward": "r2"}]']
    config = read_config(REPOSITORY / "configs" / "flux_kontext.yaml", [f"policy.model={folder}", *none])
    lines = usage(config, str(folder), merged=True)
    assert "load_image" not in lines
    assert "max_area=262144" in lines


def test_the_lines_of_the_card_load_a_pipeline_without_t5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = without(save("sd3", tmp_path / "whole"), tmp_path / "small", "text_encoder_3", "tokenizer_3")
    small = ["rollout.height=32", "rollout.width=32", "rollout.max_sequence_length=32"]
    config = read_config(TINY.with_name("tiny_sd3.yaml"), [f"policy.model={folder}", *small])
    monkeypatch.chdir(tmp_path)
    defined: dict[str, Any] = {}
    exec(usage(config, str(folder), merged=True), defined)
    assert defined["pipe"].text_encoder_3 is None
    assert defined["image"].size == (32, 32)


def test_a_glm_image_that_edits_is_given_a_list_of_images() -> None:
    """diffusers takes a list; it cannot run here, as it gives transformers' image tokenizer other features."""
    config = read_config(REPOSITORY / "configs" / "tiny_edit.yaml")
    assert 'image=[load_image("source.png")]' in usage(config, "exported", merged=True)
    assert "load_image" not in usage(read_config(REPOSITORY / "configs" / "tiny.yaml"), "exported", merged=True)


PROMPTS = ("a red circle",) * 2
SECTION = PolicySection(kind="diffusers", model="org/base", train=("denoising",))


def latents(made: DenoisingComponent, name: str, pipeline: Any) -> Tensor:
    """What a pipeline draws in two steps, without a scheduler of ours."""
    pipeline.set_progress_bar_config(disable=True)
    size = size_of(name)
    call = made.call_arguments(PROMPTS, drafts(name, size, len(PROMPTS)), size)
    noise = [torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))]
    drawn: Tensor = pipeline(**call, num_inference_steps=2, generator=noise, output_type="latent").images
    return drawn


def exported(made: DenoisingComponent, folder: Path) -> Path:
    weights, out = folder / "weights", folder / "exported"
    weights.mkdir()
    made.save_weights(weights)
    write_adapter("denoising", weights, out, SECTION)
    return out


@pytest.mark.parametrize("name", PIPELINES)
def test_diffusers_draws_with_the_adapter_what_the_policy_draws(name: str, tmp_path: Path) -> None:
    made = component(name)
    expected, folder = latents(made, name, made.pipeline), exported(made, tmp_path)
    plain, _ = MAKE[name]()
    assert not torch.allclose(latents(made, name, plain), expected, atol=1e-3)
    plain.transformer.load_lora_adapter(str(folder), weight_name=DIFFUSERS_FILE)
    assert torch.equal(latents(made, name, plain), expected)
    # GlmImagePipeline has no loader of its own.
    if name != "glm_image":
        other, _ = MAKE[name]()
        other.load_lora_weights(str(folder))
        assert torch.equal(latents(made, name, other), expected)


def adapted(settings: LoraSettings) -> RandomComponent:
    pipeline, arguments = MAKE["sd3"]()
    trained = train_model(
        pipeline.transformer, TrainingChoice(settings), base_name="sd3", default_targets=DECODER_LINEARS
    )
    disturb_component(trained)  # type: ignore[arg-type]
    made = component("sd3")
    return RandomComponent(pipeline, made.settings, trained, arguments=arguments)


@pytest.mark.parametrize("kind", ["rslora", "dora"])
def test_other_kinds_of_adapters_are_loaded_as_they_are(kind: str, tmp_path: Path) -> None:
    made = adapted(LoraSettings(4, 8.0, use_rslora=kind == "rslora", use_dora=kind == "dora"))
    plain, _ = MAKE["sd3"]()
    plain.load_lora_weights(str(exported(made, tmp_path)))
    torch.testing.assert_close(
        latents(made, "sd3", plain), latents(made, "sd3", made.pipeline), atol=0 if kind == "rslora" else 1e-5, rtol=0
    )


def test_an_adapter_with_whole_modules_is_refused(tmp_path: Path) -> None:
    made = adapted(LoraSettings(4, 8.0, modules_to_save=("proj_out",)))
    (error,) = refused(lambda: exported(made, tmp_path))
    assert error.place == "policy.lora.modules_to_save"
