"""A model's digest: changed by every file that the loader may read."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.placement import PlacementSection
from configs.sections import LoraSection, PolicySection
from grpo_core.errors import InputError
from grpo_core.policies.trained.settings import ADAPTER_FILE, LoraSettings, TrainingChoice
from tasks.models import resident
from tasks.models.initial import forget_hub, initial_digest, model_digest, training_choices
from tasks.models.resident import ModelSpec, ResidentPolicy
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tests.grpo_core.policies.trained.tiny_models import disturb
from tests.tasks.update.update_jobs import JOINT, TEXTS, Modality
from tests.tiny_policies import MODEL as IMAGE_MODEL
from tests.tiny_policies import TEXT_MODEL

LOADED = ("transformer/model.safetensors", "transformer/pytorch_model.bin", "vae/config.json")


@pytest.mark.parametrize(("name", "counts"), [*((name, True) for name in LOADED), ("README.md", False)])
def test_files_that_may_be_loaded_count_and_others_do_not(tmp_path: Path, name: str, counts: bool) -> None:
    digests = []
    for content in ("one", "two"):
        file = tmp_path / content / name
        file.parent.mkdir(parents=True)
        (tmp_path / content / "config.json").write_text("{}")
        file.write_text(content)
        digests.append(model_digest(str(tmp_path / content)))
    assert (digests[0] != digests[1]) is counts


def _replaced(file: Path, text: str) -> None:
    """Another file of the same size and time."""
    status = file.stat()
    other = file.with_name("other")
    other.write_text(text)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)


def _overwritten(file: Path, text: str) -> None:
    later = file.stat().st_mtime_ns + 1
    file.write_text(text)
    os.utime(file, ns=(later, later))


@pytest.mark.parametrize(
    "change",
    [
        lambda file: _overwritten(file, "ten"),
        lambda file: _overwritten(file, "three"),
        lambda file: _replaced(file, "two"),
        lambda file: file.with_name("more.json").write_text("{}"),
        lambda file: file.unlink(),
    ],
    ids=["same size", "another size", "another file", "added", "removed"],
)
def test_a_process_sees_that_a_model_folder_has_changed(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "model.safetensors"
    weights.write_text("one")
    before = model_digest(str(model))
    change(weights)
    fresh = shutil.copytree(model, tmp_path / "fresh")
    assert model_digest(str(model)) == model_digest(str(fresh)) != before


def test_a_worker_asks_the_hub_again_if_its_commit_is_not_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["old", "new"]
    monkeypatch.setattr("tasks.models.initial.fetch", lambda *_, **__: Path("snapshots", answers[0]))
    loaded: list[str] = []
    monkeypatch.setattr(resident, "load_policy", lambda spec, *_: loaded.append(spec.digest) or None)
    forget_hub()
    section = TEXTS.spec().section.model_copy(update={"model": "of/nobody"})
    for digest in ("old", "new"):
        answers[0] = digest
        with contextlib.suppress(AttributeError):
            ResidentPolicy().at(
                PolicyRef(version=0, digest=digest),
                TEXTS.spec().model_copy(update={"section": section, "digest": digest}),
                None,
                PlacementSection(devices="cpu"),
            )
    forget_hub()
    assert loaded == ["old", "new"]


CONFIG_FILE = "adapter_config.json"


def trained_adapters(job: Modality, choice: TrainingChoice, folder: Path) -> None:
    """Write the disturbed adapter of each component that the job trains, in a folder of its stream."""
    choices = dict.fromkeys(job.policy.streams, choice)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "autocast": None}
    policy = job.spec().family.policy_class().load(job.policy.model, job.rollout, choices, **options)
    for stream, component in policy.components.items():
        disturb(component.trainable_parameters(), 0.05)
        (folder / stream).mkdir()
        component.save_weights(folder / stream)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained adapter of the tiny text model, as peft stores it."""
    folder = tmp_path_factory.mktemp("adapter")
    trained_adapters(TEXTS, TrainingChoice(LoraSettings(4, 6.0, use_rslora=True, modules_to_save=("norm",))), folder)
    return folder / "tokens"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of each half of the tiny image model, in a subfolder each."""
    folder = tmp_path_factory.mktemp("both")
    trained_adapters(JOINT, TrainingChoice(LoraSettings(4, 8.0)), folder)
    return folder


def test_each_part_has_the_adapters_of_its_own_settings(store: ArtifactStore) -> None:
    both = {"train": ["tokens", "denoising"], "lora": {"rank": 4}, "denoising_lora": {"rank": 8, "targets": "attn"}}
    policy = PolicySection.model_validate({"model": str(IMAGE_MODEL), **both})
    with training_choices(policy, store, None) as choices:
        settings = [choices[stream].lora for stream in ("tokens", "denoising")]
    assert settings == [LoraSection(rank=4), LoraSection(rank=8, targets="attn")]
    with training_choices(policy.model_copy(update={"denoising_lora": None}), store, None) as choices:
        assert choices["tokens"].lora == choices["denoising"].lora == LoraSection(rank=4)


def section(adapter: Path, **changes: Any) -> PolicySection:
    values = {"kind": "causal_lm", "model": str(TEXT_MODEL), "dtype": "float32", "adapter": str(adapter), **changes}
    return PolicySection.model_validate(values)


def choice_of(policy: PolicySection, store: ArtifactStore) -> TrainingChoice:
    with training_choices(policy, store, None) as choices:
        return choices["tokens"]


def test_training_starts_from_it_and_so_does_the_reference(stored: Path, store: ArtifactStore) -> None:
    policy = section(stored)
    # Not mentioned, the settings are the adapter's, also when the configuration is written out and read again.
    assert policy.lora is None
    assert section(stored, **policy.model_dump(exclude={"adapter", "kind", "model", "dtype"})) == policy
    digest = initial_digest(policy, store, None)
    spec = ModelSpec(section=policy, digest=digest, adapter_seed=3, references={"tokens": "device"})
    loaded = (
        ResidentPolicy()
        .at(PolicyRef(version=0, digest=digest), spec, TEXTS.rollout, PlacementSection(devices="cpu"))
        .components["tokens"]
    )
    saved = stored.parent / "saved"
    saved.mkdir()
    loaded.save_weights(saved)
    assert (saved / ADAPTER_FILE).read_bytes() == (stored / ADAPTER_FILE).read_bytes()
    was, now = (json.loads((folder / CONFIG_FILE).read_text()) for folder in (stored, saved))
    for config in (was, now):
        config["target_modules"] = sorted(config["target_modules"])
    assert now == was
    ids = torch.arange(12).reshape(2, 6)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = loaded.trained.model(input_ids=ids, use_cache=False).logits
        return found

    start = logits()
    disturb(loaded.trainable_parameters(), 0.05, seed=6)
    with loaded.trained.reference():
        assert torch.equal(logits(), start)
    assert not torch.equal(logits(), start)
    loaded.load_weights(None)
    assert torch.equal(logits(), start)


def test_it_is_part_of_what_training_starts_from(stored: Path, store: ArtifactStore, tmp_path: Path) -> None:
    own = section(stored)
    plain = own.model_copy(update={"adapter": None})
    assert len({initial_digest(each, store, None) for each in (plain, own)}) == 2
    other = tmp_path / "other"
    shutil.copytree(stored, other)
    assert initial_digest(section(other), store, None) == initial_digest(own, store, None)
    edit(other, lora_alpha=7.0)
    assert initial_digest(section(other), store, None) != initial_digest(own, store, None)
    shutil.copytree(TEXT_MODEL, tmp_path / "copy")
    assert choice_of(section(stored, model=str(tmp_path / "copy")), store).lora == LoraSettings(
        4, 6.0, targets=choice_of(section(stored), store).lora.targets, use_rslora=True, modules_to_save=("norm",)
    )


def edit(folder: Path, **changes: Any) -> None:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


REFUSED: dict[str, tuple[Callable[[Path], object], dict[str, Any], str, str]] = {
    "another base": (lambda folder: edit(folder, base_model_name_or_path="org/other"), {}, "policy.adapter", "org/oth"),
    "another revision": (lambda folder: edit(folder, revision="v1"), {}, "policy.adapter", "revision v1 of"),
    "another kind": (lambda folder: edit(folder, peft_type="IA3"), {}, "policy.adapter", "IA3"),
    "biases": (lambda folder: edit(folder, bias="all"), {}, "policy.adapter", "bias all"),
    "a base that it changed": (lambda folder: edit(folder, init_lora_weights="corda"), {}, "policy.adapter", "corda"),
    "no weights": (lambda folder: (folder / ADAPTER_FILE).unlink(), {}, "policy.adapter", ADAPTER_FILE),
    "damaged": (lambda folder: (folder / CONFIG_FILE).write_text("{"), {}, "policy.adapter", "damaged"),
    "no folder": (shutil.rmtree, {}, "policy.adapter", "no such folder"),
    "another rank": (lambda folder: None, {"lora": LoraSection(rank=8)}, "policy.lora.rank", "has 4"),
    "another scale": (
        lambda folder: None,
        {"lora": LoraSection(rank=4, alpha=6.0, modules_to_save=("norm",))},
        "policy.lora.use_rslora",
        "has True",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, stored: Path, store: ArtifactStore, tmp_path: Path) -> None:
    prepare, changes, place, said = REFUSED[case]
    folder = tmp_path / "adapter"
    shutil.copytree(stored, folder)
    prepare(folder)
    with pytest.raises(InputError) as caught:
        choice_of(section(folder, **changes), store)
    assert (caught.value.place, said in caught.value.hint) == (place, True)


def image_section(adapter: Path, *train: str) -> PolicySection:
    values = {"model": str(IMAGE_MODEL), "dtype": "float32", "adapter": str(adapter), "train": train}
    return PolicySection.model_validate(values)


@pytest.mark.parametrize("train", [("tokens", "denoising"), ("denoising",)], ids=["both", "decoder"])
def test_each_component_starts_from_its_own_adapter(train: tuple[str, ...], both: Path, store: ArtifactStore) -> None:
    policy = image_section(both, *train)
    digest = initial_digest(policy, store, None)
    spec = ModelSpec(section=policy, digest=digest, adapter_seed=3, references={})
    start = PolicyRef(version=0, digest=digest)
    loaded = ResidentPolicy().at(start, spec, JOINT.rollout, PlacementSection(devices="cpu"))
    assert tuple(loaded.components) == policy.streams
    for stream, component in loaded.components.items():
        saved = both.parent / f"{len(train)}-{stream}"
        saved.mkdir()
        component.save_weights(saved)
        assert (saved / ADAPTER_FILE).read_bytes() == (both / stream / ADAPTER_FILE).read_bytes()


def test_an_adapter_of_one_component_does_not_start_two(both: Path, store: ArtifactStore, tmp_path: Path) -> None:
    shutil.copytree(both / "tokens", tmp_path / "flat")
    shutil.copytree(both / "tokens", tmp_path / "half" / "tokens")
    for folder, missing in (("flat", "tokens"), ("half", "denoising")):
        with pytest.raises(InputError, match=missing) as caught:
            choice_of(image_section(tmp_path / folder, "tokens", "denoising"), store)
        assert caught.value.place == "policy.adapter"
    assert choice_of(image_section(tmp_path / "flat", "tokens"), store).adapter == tmp_path / "flat"
    other = image_section(tmp_path / "flat", "denoising")
    with training_choices(other, store, None) as choices, pytest.raises(InputError) as caught:
        JOINT.spec().family.check_choices(str(IMAGE_MODEL), choices)
    assert (caught.value.place, caught.value.value) == ("policy.adapter", str(tmp_path / "flat"))


def test_both_adapters_are_part_of_what_training_starts_from(both: Path, store: ArtifactStore, tmp_path: Path) -> None:
    digests = set()
    for changed in ("nothing", *JOINT.policy.streams):
        folder = tmp_path / changed
        shutil.copytree(both, folder)
        if changed != "nothing":
            edit(folder / changed, lora_alpha=7.0)
        digests.add(initial_digest(image_section(folder, "tokens", "denoising"), store, None))
    assert len(digests) == 3


def test_weights_of_another_shape_are_refused(stored: Path, store: ArtifactStore, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(stored, folder)
    state = load_file(folder / ADAPTER_FILE)
    name = next(iter(state))
    save_file({**state, name: state[name][:-1].clone()}, folder / ADAPTER_FILE)
    with pytest.raises(InputError) as caught:
        TEXTS.spec().family.check_choices(str(TEXT_MODEL), {"tokens": choice_of(section(folder), store)})
    assert (caught.value.place, caught.value.value) == ("policy.adapter", str(folder))
