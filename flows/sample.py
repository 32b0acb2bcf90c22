"""`grpo sample`: draw or answer prompts with a run's policy, an exported folder, or any model's folder."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import BaseModel

from configs.loader import apply_overrides
from configs.placement import PlacementSection
from configs.policy_name import PolicyName
from configs.schema import AnyRollout, ByPolicy
from configs.sections import PolicySection, kind_of
from configs.validation import validated
from flows.export.folder import is_adapter, policy_values, require_same_base
from flows.pipeline.lineage import model_problems
from flows.preflight.model import source_of
from flows.preflight.trust import OF_MODEL, changes_without_effect, require_trust, trusted_config
from flows.requests import SampleRequest, refuse_overrides
from grpo_core.errors import InputError, NonFiniteError, raise_all
from grpo_core.pipeline_files import CONFIG_FILE, INDEX_FILE, read_kind
from grpo_core.policies.protocol import Policy, policy_family
from grpo_core.rollouts.images import SourceImage
from grpo_core.rollouts.messages import caption_of, read_messages, refuse_messages
from grpo_core.rollouts.records import BrokenImage, GroupRequest
from grpo_core.seeds import derive_seed
from tasks.models.devices import configure_torch
from tasks.models.initial import RECORD_FILE
from tasks.models.resident import ModelSpec, ResidentPolicy, load_policy
from tasks.prompts.marks import mark_images, require_match
from tasks.prompts.source_images import load_source
from tasks.runs.lookup import find_run, read_description
from tasks.runs.stored_policies import adapter_version, choose_policy, chosen_version
from tasks.runs.trust import uses_of
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import RUN_FILE, ArtifactStore, use_store
from tasks.storage.files import require_writable


class _Sampling(ByPolicy):
    """The sections that samples need."""

    policy: PolicySection
    rollout: AnyRollout
    placement: PlacementSection = PlacementSection()


@dataclass(frozen=True)
class Source:
    """A policy that is not loaded yet.

    Attributes:
        name: for files; of the run with the version, or of the folder.
        config: sections of the model, its sampler and the device.
        version: of a run's policy; None for a folder.
        notes: messages about damaged versions that were skipped.
        prompts, images: the requested prompts as the policy gets them, and the images in each of them.
    """

    name: str
    config: Any
    spec: ModelSpec
    store: ArtifactStore | None = None
    version: PolicyRef | None = None
    notes: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    images: tuple[SourceImage, ...] = ()

    def load(self) -> Policy:
        """Load the policy with its weights, every stored file verified, over the model that it was trained from."""
        rollout, placement = self.config.rollout, self.config.placement
        if self.store is None or self.version is None:
            return load_policy(self.spec, rollout, configure_torch(placement))
        use_store(self.store)
        return ResidentPolicy().at(self.version, self.spec, rollout, placement)


def open_source(request: SampleRequest) -> Source:
    """Find the run or the folder, and check what does not need the model; an InputError names each option."""
    refuse_overrides(request.overrides, request.hint_against)
    folder = Path(request.source).expanduser()
    source = _open_folder(folder, request) if _is_model(folder) else _open_run(request)
    loaded = [load_source(uri, "--image") for uri in request.images]
    captions = source.spec.family.modality == "image"
    prompts = tuple(_read(prompt, len(loaded), captions=captions) for prompt in request.prompts)
    sizes = [[size for _, size in loaded]] * len(prompts) if loaded else []
    source.spec.family.refuse_prompts(source_of(source.config), source.config.rollout, prompts, sizes)
    return replace(source, prompts=prompts, images=tuple(image for image, _ in loaded))


def _read(prompt: str, images: int, *, captions: bool) -> str:
    """Return a prompt as policies get it; one of a request without images is a text like any other."""
    if (messages := read_messages(prompt)) is not None:
        refuse_messages(messages, "PROMPT", images=images > 0)
    if images:
        marked = mark_images(prompt, "PROMPT")
        require_match(marked, images, "PROMPT")
        prompt = marked.text
    return caption_of(prompt, "PROMPT") if captions else prompt


def _is_model(folder: Path) -> bool:
    is_model = any((folder / name).is_file() for name in (INDEX_FILE, CONFIG_FILE)) or is_adapter(folder)
    return is_model and not (folder / RUN_FILE).exists()


def _open_run(request: SampleRequest) -> Source:
    named = PolicyName.parse(request.source)
    store = find_run(named.run, request.root)
    moved, digest = request.moved, str(read_description(store).get("model_digest", ""))
    trust, hint_against = request.trust_code, request.hint_against
    stored = trusted_config(store, moved, trust=trust, sections=OF_MODEL, hint_against=hint_against)
    raise_all(model_problems(store, stored, stored, 0, "") if moved else ())
    chosen, notes = choose_policy(store, chosen_version(store, named.version), digest)
    # Samples need no reference.
    version = chosen.averaged.with_copies("ema", "old")
    # They are drawn as the evaluations draw, and what is set here counts more than either section of the run.
    shown = {"policy": stored.policy, "rollout": stored.evaluation_rollout, "placement": stored.placement}
    sections = {name: each.model_dump(mode="json") for name, each in shown.items()}
    raise_all(apply_overrides(sections, request.overrides))
    config = validated(_Sampling, sections)
    raise_all(changes_without_effect(stored.evaluation_rollout, config.rollout))
    spec = _spec(config.policy, digest, adapter_version(stored))
    return Source(f"{store.run}-v{version.version}", config, spec, store, version, notes)


def _open_folder(folder: Path, request: SampleRequest) -> Source:
    record = folder / RECORD_FILE
    merged = not is_adapter(folder)
    if record.is_file():
        values = _read_record(record)
    elif merged:
        values = {"policy": _described(folder)}
    else:
        hint = f"It is an adapter without {RECORD_FILE}, which `grpo export` writes; merge it into its base first."
        raise InputError("RUN|MODEL", str(folder), hint)
    sections: dict[str, Any] = {name: values[name] for name in ("policy", "rollout") if name in values}
    sections["policy"] = policy_values(folder, sections["policy"], merged=merged)
    raise_all(apply_overrides(sections, request.overrides))
    images = policy_family(kind_of(sections["policy"])).modality == "image"
    if images and not {"height", "width"} <= sections.get("rollout", {}).keys():
        hint = "This model states no size; give --set rollout.height=1024 --set rollout.width=1024."
        raise InputError("rollout.height and width", None, hint)
    config = validated(_Sampling, {"rollout": {}, **sections})
    # The folder itself is what the person named.
    uses = [use for use in uses_of(config, within=OF_MODEL) if use.value != str(folder)]
    require_trust(uses, str(record), trust=request.trust_code)
    if not merged:
        require_same_base(values.get("base_digest"), sections["policy"])
    return Source(folder.resolve().name, config, _spec(config.policy, ""))


def _read_record(file: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        values["policy"]["model"], values.get("rollout", {}).keys()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError("RUN|MODEL", str(file), f"It is damaged ({error!r}); export the policy again.") from error
    return values


def _described(folder: Path) -> dict[str, object]:
    """Return the kind of a model that this project did not export; it is loaded in its own precision."""
    images = (folder / INDEX_FILE).is_file()
    config = folder / "transformer" / CONFIG_FILE if images else folder / CONFIG_FILE
    stated = json.loads(config.read_text()).get("dtype") if config.is_file() else None
    return {
        "kind": read_kind(str(folder)),
        "dtype": stated if stated in ("float32", "bfloat16") else "bfloat16",
    }


def _spec(section: PolicySection, digest: str, adapter: ArtifactRef | None = None) -> ModelSpec:
    return ModelSpec(section=section, digest=digest, adapter_seed=0, references={}, adapter=adapter)


FOLDER = "samples"
_LETTERS = 40


class Sample(BaseModel):
    """One sample of a prompt.

    Attributes:
        index: which of the prompt's samples, from 1.
        text, file: the answer, or the path of the image; the other is None.
        truncated: whether the text was cut at rollout.max_completion_length.
    """

    prompt: str
    index: int
    text: str | None
    file: str | None
    truncated: bool


def check_output(request: SampleRequest, source: Source) -> Path | None:
    """Return the folder for images, which must be writable; None for texts, which have none."""
    if source.spec.family.modality == "text":
        if request.out is not None:
            raise InputError("--out", request.out, "This model answers with texts, which are printed; leave it out.")
        return None
    folder = Path(request.out or FOLDER).expanduser()
    require_writable(folder.absolute(), "--out")
    return folder


def sample(request: SampleRequest, source: Source) -> Iterator[Sample]:
    """Sample prompt by prompt; a sample depends on its prompt, its index and the seed alone, and NaN raises."""
    folder, policy = check_output(request, source), source.load()
    numbers = range(request.samples)
    seeds = tuple(derive_seed(request.seed, "tokens", number) for number in numbers)
    noise = tuple(derive_seed(request.seed, "noise", number) for number in numbers)
    for place, prompt in enumerate(source.prompts, start=1):
        sample_ids = tuple(f"{prompt!r}, {index}" for index in range(1, request.samples + 1))
        (group,) = policy.sample([GroupRequest(prompt, sample_ids, seeds, noise, sources=source.images)])
        for index, output in enumerate(group.outputs, start=1):
            if isinstance(output, BrokenImage):
                raise NonFiniteError("a decoded image", [sample_ids[index - 1]], f"{output.reason}.")
            file = None
            if isinstance(output, Image.Image) and folder is not None:
                words = re.sub(r"\W+", "-", prompt.lower()).strip("-")[:_LETTERS]
                file = folder / f"{source.name}-{place:02d}-{words}-seed{request.seed}-{index}.png"
                folder.mkdir(parents=True, exist_ok=True)
                output.save(file)
            text = output if isinstance(output, str) else None
            sampled = group.streams.get("tokens") if text is not None else None
            truncated = sampled is not None and not bool(sampled.finished[index - 1])
            path = None if file is None else str(file)
            yield Sample(prompt=prompt, index=index, text=text, file=path, truncated=truncated)
