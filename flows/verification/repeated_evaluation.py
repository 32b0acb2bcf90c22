"""`grpo evaluate EXPORT --card`: the evaluation of an exported policy, repeated from its folder alone and compared."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prefect import flow

from configs.schema import RunConfig
from flows.export.card_request import card_config, read_request
from flows.export.folder import adapter_over, require_same_base
from flows.pipeline.lineage import stage_code
from flows.pipeline.prefect_ui import RepeatForm, publish_report
from flows.pipeline.run import Run, plan_heldout
from flows.pipeline.stages import evaluate_policy, recording
from flows.preflight.inputs import check_evaluation
from flows.preflight.prompts import PromptFiles
from flows.requests import RepeatRequest
from grpo_core.errors import FailedSamplesError, InputError
from grpo_core.rollouts.streams import ImageSize
from tasks.execution.fingerprint import changed_versions, code_fingerprint, running_versions
from tasks.models.devices import describe_processor
from tasks.models.resident import ModelSpec
from tasks.process import code_version
from tasks.progress import log
from tasks.prompts.curriculum import PromptSet
from tasks.prompts.files import read_input_file
from tasks.prompts.read import Prompt
from tasks.prompts.source_images import SourceReference, load_source
from tasks.prompts.targets import TargetReference, load_target
from tasks.reports.text import counted
from tasks.rollouts.plan import RolloutPlan
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import MAX_SOURCE_BYTES, files_below, hashes_of, scratch_folder
from tasks.storage.run_lock import locked
from tasks.update.update_policy import STAGE as UPDATE
from tasks.verification.evaluation_card import (
    EVALUATION_FILE,
    IMAGES_FOLDER,
    CardPrompt,
    EvaluationCard,
    changed_prompts,
)
from tasks.verification.measured_evaluation import MeasuredEvaluation
from tasks.verification.records import Machine
from tasks.verification.repeated import (
    RepeatedEvaluation,
    compare_scores,
    inconsistent_scores,
    lowest_level,
    other_origins,
)


@dataclass(frozen=True)
class RepeatPlan:
    """What is repeated.

    Attributes:
        config: the sections of the card, with the folder's weights, in a storage root of its own.
        problems: what the card says that the folder contradicts.
    """

    card: EvaluationCard
    config: RunConfig
    store: ArtifactStore
    model: ModelSpec
    heldout: tuple[PromptSet, ...]
    rollouts: RolloutPlan
    problems: tuple[str, ...]


def plan_repeat(request: RepeatRequest, scratch: Path) -> RepeatPlan:
    """Check card, folder, base and machine; an InputError names what has to be there, and nothing is executed before.

    `scratch` is a folder for the storage root of the repetition, and for what of the adapter has to be changed.
    """
    card, folder = read_request(request), Path(request.folder).expanduser().absolute()
    config = card_config(card, request, scratch / "runs")
    moved = config.policy.model != card.settings.policy.get("model")
    if not card.merged:
        require_same_base(card.base_digest, config.policy.model_dump())
        if moved:
            adapter = str(adapter_over(folder, config.policy.model, scratch))
            config = config.model_copy(update={"policy": config.policy.model_copy(update={"adapter": adapter})})
    heldout = _prompt_sets(card, folder)
    inputs = check_evaluation(config, PromptFiles({"data": (), "evaluate": heldout}, (), ()))
    rollouts = plan_heldout(config, heldout, 0)
    assert rollouts is not None, "the card has prompts"
    made = [name for group in rollouts.groups for name in rollouts.sample_ids(group)]
    if sorted(made) != sorted(card.samples):
        hint = "They are not those that its prompts have. No export wrote it so."
        raise InputError(f"{folder / EVALUATION_FILE}, samples", f"{len(card.samples):,} samples", hint)
    of_settings = [("reward", "mix"), *((each.label, "reward") for each in config.rewards)]
    of_settings += [(each.label, "guardrail") for each in config.guardrails.rewards]
    if sorted(of_settings) != sorted((each.label, each.role) for each in card.scores):
        named = ", ".join(each.title for each in card.scores)
        hint = "They are not those of its settings. No export wrote it so."
        raise InputError(f"{folder / EVALUATION_FILE}, scores", named, hint)
    groups = [name.rpartition(".")[0] for name in card.samples]
    problems = (*_changed_weights(card, folder), *changed_prompts(card), *inconsistent_scores(card, groups))
    return RepeatPlan(card, config, inputs.store, inputs.model, heldout, rollouts, problems)


def _prompt_sets(card: EvaluationCard, folder: Path) -> tuple[PromptSet, ...]:
    sets = []
    for dataset in card.datasets:
        own = [each for each in card.prompts if each.dataset == dataset.name]
        prompts = tuple(_prompt(each, folder) for each in own)
        targets = tuple(_target(each, folder) for each in own)
        sizes = tuple(ImageSize(each.width, each.height) for each in own if each.width and each.height)
        sets.append(PromptSet(dataset.name, 1.0, prompts, targets, sizes))
    return tuple(sets)


def _image(digest: str, folder: Path) -> str:
    """Return the path of an image of the card; InputError if it is no file, or a larger one than any image."""
    file = folder / IMAGES_FOLDER / digest
    if not file.is_file() or file.stat().st_size > MAX_SOURCE_BYTES:
        found = "too large" if file.is_file() else "no file"
        raise InputError(str(file), found, "It is an image of a held-out prompt; the export that was sent lacks it.")
    return str(file)


def _prompt(prompt: CardPrompt, folder: Path) -> Prompt:
    sources = []
    for digest in prompt.sources:
        place, uri = f"prompt {prompt.prompt_id}", _image(digest, folder)
        _, size = load_source(uri, place)
        sources.append(SourceReference(digest, size, place, uri, partial(read_input_file, uri, place=place)))
    return Prompt(prompt.prompt_id, prompt.prompt, prompt.columns, tuple(sources))


def _target(prompt: CardPrompt, folder: Path) -> TargetReference | None:
    if prompt.target is None:
        return None
    target = TargetReference(_image(prompt.target, folder), prompt.target)
    load_target(target)
    return target


def _changed_weights(card: EvaluationCard, folder: Path) -> list[str]:
    """Name the exported files that are not those of the card, as sentences."""
    present = files_below(folder)
    known = {name: "" for name in present if name not in card.weights}
    found: Mapping[str, str] = {**hashes_of(folder, known), **known}
    return [
        f"{name} is not the file that was exported: its sha256 is {found.get(name, 'that of no file')[:12]}, "
        f"and the card's {digest[:12]}"
        for name, digest in card.weights.items()
        if found.get(name) != digest
    ]


@flow(name="grpo evaluate card", flow_run_name="{request.folder}")
async def repeat_evaluation(request: RepeatForm) -> RepeatedEvaluation:
    """Repeat the evaluation of an exported policy from its folder alone, and compare; nothing is changed."""
    started = time.perf_counter()
    with scratch_folder() as scratch:
        plan = plan_repeat(request, scratch)
        prompts = counted(len(plan.card.prompts), "prompt")
        log(f"{plan.card.run}, version {plan.card.version}: {prompts}, {counted(len(plan.card.samples), 'sample')}")
        with locked(plan.store, setting="EXPORT", value=request.folder) as lock:
            run = Run(plan.config, plan.store, lock, plan.model, (), plan.heldout)
            async with recording(run.store, lock):
                try:
                    done = evaluate_policy(run, run.base_policy, plan.rollouts)
                except FailedSamplesError as error:
                    raise InputError("EXPORT", request.folder, f"A reward cannot be computed here: {error}") from error
        measured = MeasuredEvaluation(plan.store, done)
    summary = _compared(plan, measured, request.folder, started)
    await publish_report(summary.report(), f"evaluate-card-{summary.run}")
    return summary


def _compared(plan: RepeatPlan, measured: MeasuredEvaluation, folder: str, started: float) -> RepeatedEvaluation:
    card = plan.card
    # In the order of the card.
    places = {name: place for place, name in enumerate(measured.samples)}
    order = [places[name] for name in card.samples]
    computed = [
        each.model_copy(update={"values": tuple(each.values[place] for place in order)}) for each in measured.scores
    ]
    machine = Machine(
        code=code_version(), processor=describe_processor(plan.config.placement), versions=running_versions()
    )
    explanations = tuple(_explanations(plan, machine))
    problems = (*plan.problems, *other_origins(card, computed))
    scores = compare_scores(card, computed, explanations=explanations, unknown=card.machine.processor is None)
    return RepeatedEvaluation(
        folder=folder,
        run=card.run,
        version=card.version,
        level=lowest_level(scores, problems),
        scores=scores,
        problems=problems,
        explanations=explanations,
        made_by=card.machine,
        repeated_by=machine,
        seconds=time.perf_counter() - started,
    )


def _explanations(plan: RepeatPlan, machine: Machine) -> list[str]:
    card = plan.card
    found = [f"package {each}" for each in changed_versions(card.machine.versions, machine.versions)]
    if card.machine.processor not in (None, machine.processor):
        found.append(f"processor: {card.machine.processor} -> {machine.processor}")
    if card.merged and (card.settings.policy.get("lora") or card.settings.policy.get("adapter")):
        found.append("merged weights round otherwise than the base with its adapters")
    code = {name: code_fingerprint(roots) for name, roots in stage_code(plan.config, plan.model).items()}
    changed = [name for name in code if name != UPDATE and code[name] != card.fingerprints.get(name, code[name])]
    if changed:
        found.append(f"the code of {', '.join(changed)} has changed: {card.machine.code} -> {machine.code}")
    return found
