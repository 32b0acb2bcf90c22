"""What a run's results are made of, input by input, so that a start can say which of them changed.

The digests in run.json only name a change: whether there is one is for the identity to say, which has the same parts.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from configs.identity import changed_settings
from configs.prompts import PromptsSection
from configs.schema import RunConfig
from grpo_core.rewards.registry import build_reward
from grpo_core.rollouts.messages import shown_question
from grpo_core.user_code.files import changed_parts, follow_code
from tasks.models.initial import model_digest, model_files
from tasks.prompts.curriculum import PromptSet
from tasks.prompts.read import Prompt
from tasks.reports.text import one_line
from tasks.rewards.score_rewards import scores_key
from tasks.runs.layout import IMAGES, ROLLOUTS, STATES, iteration_folder
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.store import ArtifactStore

INPUTS = "inputs"
"""In an identity: digests of the parts of each input, by the input's name; no part of the identity's digest."""

HELDOUT = "heldout"
"""The same of the held-out prompts, which decide about evaluations alone."""

_PROMPTS = "the prompts"

_SHOWN = 5
"""Number of changed parts of one input, or of changed images, that are named."""


Inputs = dict[str, dict[str, str]]
"""A digest of each part of each input, by the names that a message says."""


def inputs_of(config: RunConfig, training: Sequence[PromptSet]) -> Inputs:
    """Return what a training run's results are made of."""
    policy = config.policy
    found = {
        f"the model {policy.model}": model_files(policy.model)
        or {"commit": model_digest(policy.model, policy.revision)}
    }
    if policy.adapter is not None:
        found[f"the adapter {policy.adapter}"] = model_files(policy.adapter) or {"name": policy.adapter}
    found |= prompt_inputs("data", config.data, training)
    for reward in config.rewards:
        found |= _reward(f"rewards.{reward.label}", reward.reward, scores_key(reward), reward.settings)
    for stream, update in config.updates.items():
        if update.custom_loss is not None:
            parts = follow_code(update.objective).parts
            found[f"the loss {_short(update.objective)} ({config.update_path(stream)}.loss)"] = dict(parts)
    return {name: {part: value[:16] for part, value in parts.items()} for name, parts in found.items()}


def prompt_inputs(place: str, section: PromptsSection, sets: Sequence[PromptSet]) -> Inputs:
    """Return the parts of each prompt file of a section, given its place in the configuration."""
    found = {}
    for (own, dataset), known in zip(section.placed(place), sets, strict=False):
        texts = [prompt.text for prompt in known.prompts]
        columns: dict[str, list[object]] = {}
        for prompt in known.prompts:
            for name, value in prompt.columns.items():
                columns.setdefault(name, []).append(value)
        parts = {
            _PROMPTS: _digest(texts),
            "the target images": _digest([target and target.sha256 for target in known.targets]),
            "the images in prompts": _digest([[image.digest for image in prompt.sources] for prompt in known.prompts]),
        }
        parts |= {f"the column {name}": _digest(values) for name, values in columns.items()}
        found[f"the prompt file {dataset.prompts} ({own})"] = parts
    return found


def _reward(place: str, name: str, key: tuple[str, str], settings: Mapping[str, Any]) -> Inputs:
    """Return what the scores of a reward come from: the code of a user's function, or a version; settings, weights."""
    provenance, scope = json.loads(key[0]), key[1]
    parts = {"its settings": provenance["settings_digest"], "its scope": _digest(scope)}
    parts |= {f"its weights {role}": value for role, value in provenance["weights"].items()}
    function = build_reward(name, settings).user_function
    if function is None:
        return {place: {**parts, "its version": _digest(provenance["version"])}}
    return {f"{place} {_short(function)}": {**parts, **follow_code(function).parts}}


def _short(reference: str) -> str:
    module, _, name = reference.rpartition(":")
    return Path(module).name if module.endswith(".py") else f"{module}:{name}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def named_changes(previous: Mapping[str, Mapping[str, str]], current: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return `input changed: parts` for each input that is there before and after with other parts."""
    changes = []
    for name in sorted({*previous} & {*current}):
        if parts := changed_parts(previous[name], current[name]):
            # With other prompts everything that belongs to them is another.
            parts = [_PROMPTS] if _PROMPTS in parts else parts
            more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
            changes.append(f"{name} changed: {', '.join(parts[:_SHOWN])}{more}")
    return changes


def identity_difference(previous: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """Say what is different between the identity of a run's results and that of a start."""
    changes = []
    if settings := changed_settings(previous.get("settings", {}), identity["settings"]):
        changes.append("the configuration changed: " + "; ".join(settings))
    code: Mapping[str, str] = previous.get("code", {})
    stages = sorted(name for name, fingerprint in identity["code"].items() if code.get(name) != fingerprint)
    # Another set of rewards has other stages.
    if stages and not (settings and any("rewards" in each for each in settings) and {*stages} - {*code}):
        changes.append(f"the code of {', '.join(stages)} changed (--accept-code keeps the results)")
    if previous.get("start") != identity.get("start"):
        changes.append("it starts from another policy (run.continue_from)")
    changes += named_changes(previous.get(INPUTS, {}), identity[INPUTS])
    return "; ".join(changes) or _unnamed(previous, identity)


def _unnamed(previous: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    names = {
        "model": "the model",
        "prompts": "the prompts or their targets",
        "scores": "what a reward's scores come from",
        "losses": "the code of a loss",
    }
    # As they were read from run.json.
    now = json.loads(json.dumps(identity))
    changed = [text for key, text in names.items() if previous.get(key) != now.get(key)]
    return f"{' and '.join(changed) or 'something of it'} changed"


_LETTERS = 60

Row = dict[str, Any]
"""What rollouts have of a prompt."""


def changed_images(store: ArtifactStore, sets: Sequence[PromptSet]) -> list[str]:
    """Say which images of these prompts changed, each with its prompt, among those that were sampled."""
    rows = _sampled(store)
    found = list(dict.fromkeys([*_changed_targets(rows, sets), *_changed_sources(rows, sets)]))
    more = [f"{len(found) - _SHOWN} more images changed"] if len(found) > _SHOWN else []
    return found[:_SHOWN] + more


def _sampled(store: ArtifactStore) -> list[Row]:
    """Read the prompts of all rollouts, each once; damaged ones are left out."""
    # Imported where it is used: most starts change nothing, and polars takes a while.
    import polars as pl

    from tasks.runs.samples import read_rollouts

    names = ("dataset", "prompt_id", "prompt", "sources", "target_sha256")
    reader, tables = RunReader(store), []
    folders = [each for number in reader.iterations() for each in reader.rounds(iteration_folder(number))]
    with store.reading(without=(IMAGES, STATES)) as read:
        for folder in folders:
            stored = reader.find(f"{folder}/{ROLLOUTS}")
            names_of = stored.manifest.files if stored is not None else ()
            files = [name for name in names_of if not any(fnmatchcase(name, each) for each in (IMAGES, STATES))]
            # Reading a damaged artifact would set it aside.
            if stored is not None and reader.verify(stored, only=files):
                tables.append(read_rollouts([read(stored.reference)], names).unique(maintain_order=True))
    return pl.concat(tables, how="diagonal").unique(maintain_order=True).to_dicts() if tables else []


def _changed_targets(rows: Sequence[Row], sets: Sequence[PromptSet]) -> Iterator[str]:
    stored = {(row["dataset"], row["prompt_id"]): row.get("target_sha256") for row in rows}
    for known in sets:
        for prompt, target in zip(known.prompts, known.targets, strict=True):
            before = stored.get((known.name, prompt.prompt_id))
            if target is not None and before not in (None, target.sha256):
                yield f"the target {target.uri} of {_shown(prompt)} changed"


def _changed_sources(rows: Sequence[Row], sets: Sequence[PromptSet]) -> Iterator[str]:
    """Find prompts of the same text and columns with other images, whose prompt_id is therefore another."""
    for known in sets:
        own = [row for row in rows if row["dataset"] == known.name]
        ids, sampled = {prompt.prompt_id for prompt in known.prompts}, {row["prompt_id"] for row in own}
        gone: dict[str, list[Row]] = {}
        for row in own:
            if row["prompt_id"] not in ids:
                gone.setdefault(row["prompt"], []).append(row)
        new: dict[str, list[Prompt]] = {}
        for prompt in known.prompts:
            if prompt.text in gone and prompt.prompt_id not in sampled:
                new.setdefault(prompt.text, []).append(prompt)
        for text, prompts in new.items():
            # Among several of one text, those that were never sampled cannot be told from those that changed.
            if len(prompts) == len(gone[text]):
                before = {digest for row in gone[text] for digest in row.get("sources") or ()}
                for prompt in prompts:
                    for image in prompt.sources:
                        if image.digest not in before:
                            yield f"the image {image.name} of {_shown(prompt)} changed"


def _shown(prompt: Prompt) -> str:
    return f"the prompt {one_line(shown_question(prompt.text), _LETTERS)!r}"
