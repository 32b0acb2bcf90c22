"""Checks of everything that a configuration points to, before a model loads, a server starts or a file is written.

`CHECKS` change nothing and do not import Prefect: `grpo doctor` shows what they find, and a run refuses to start.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from configs.contradictions import contradictions, pools_of
from configs.prompts import DataSection
from configs.schema import ReplayConfig, RunConfig
from configs.sections import LoraSection
from flows.preflight.engine import check_engine
from flows.preflight.files import check_storage, checked_once, prepare_hub, read_files
from flows.preflight.machine import compare_disk, describe_work
from flows.preflight.model import (
    check_device,
    check_model,
    check_trackers,
    check_update,
    estimate_model,
    refuse_prompt_texts,
    source_of,
    trained_model,
    with_memory,
)
from flows.preflight.prompts import PromptFiles, check_prompts
from flows.preflight.rewards import check_rewards, code_notes
from flows.server.reachable import require_pools, require_server, require_ui
from grpo_core.errors import InputError, raise_all
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.settings import LoraSettings
from tasks.models.initial import training_choices
from tasks.models.resident import ModelSpec
from tasks.prompts.curriculum import PromptSet
from tasks.storage.artifacts.store import ArtifactStore, open_store

Check = Callable[[RunConfig, PromptFiles], Iterator[InputError]]

CHECKS: Mapping[str, Check] = {
    "prompts": check_prompts,
    "model": check_model,
    "rewards": check_rewards,
    "update": check_update,
    "engine": check_engine,
    "device": check_device,
    "storage": check_storage,
    "trackers": check_trackers,
}
"""Checks by subject that load no model, write no file and do not import Prefect."""


@dataclass(frozen=True)
class RunInputs:
    """The checked inputs of a run.

    Attributes:
        notes: what a person should know about inputs that can be used.
        ahead: what the run samples, and its disk; nothing for a replay.
    """

    store: ArtifactStore
    model: ModelSpec
    training: tuple[PromptSet, ...]
    heldout: tuple[PromptSet, ...]
    notes: tuple[str, ...]
    ahead: tuple[str, ...] = ()


@checked_once
def check_inputs(config: RunConfig) -> RunInputs:
    """Check all inputs of a run.

    A model named by a hub id may be downloaded, and a probe is written to the storage root.

    Raises:
        InputError: with one entry per problem; server and pools are reported when nothing else is wrong.
    """
    files = run_checks(config)
    require_pools(pools_of(config))
    if config.guardrails.on_fall == "pause":
        require_ui("guardrails.on_fall", "pause")
    inputs, ahead = _check_model(config, files), tuple[str, ...]()
    with training_choices(config.policy, inputs.store, inputs.model.adapter) as choices:
        for choice in choices.values():
            _refuse_stored_settings(config, choice.lora)
        notes = policy_family(config.policy.kind).check_choices(source_of(config), choices)
        if not isinstance(config, ReplayConfig):
            estimate = estimate_model(config, choices, tuple(files.by_size))
            disk = compare_disk(config, estimate.checkpoint, estimate.states, files.by_size)
            ahead = (f"work: {describe_work(config)}", f"disk: {disk.message}. {disk.hint}".rstrip(". "))
    inputs.store.require_writable()
    if config.storage.cache_dir is not None and inputs.store.files.cache is not None:
        inputs.store.files.cache.require_usable()
    # Last, since it imports Prefect, which takes seconds.
    require_server()
    return replace(inputs, notes=(*inputs.notes, *notes, *config.cautions), ahead=ahead)


def check_evaluation(config: RunConfig, files: PromptFiles | None = None) -> RunInputs:
    """Check what an evaluation of a run's policies needs: neither training prompts nor the update.

    `files` are its prompts where they are in no prompt file; None reads those of the configuration.
    """
    unsharded = config.placement.model_copy(update={"sharding": "ddp"})
    unused = {"data": DataSection(), "update": type(config.update)(), "placement": unsharded}
    config = config.model_copy(update=unused)
    # The run has been opened, and its configuration may name the root of another machine.
    files = run_checks(config, {name: check for name, check in CHECKS.items() if name != "storage"}, files)
    require_pools([(place, pool) for place, pool in pools_of(config) if place != "placement.update.pool"])
    inputs = _check_model(config, files)
    require_server()
    return inputs


def run_checks(
    config: RunConfig, checks: Mapping[str, Check] = CHECKS, files: PromptFiles | None = None
) -> PromptFiles:
    """Run the checks and return the prompts that they read, or those that were given."""
    prepare_hub(config)
    files = files or read_files(config)
    raise_all(problem for check in checks.values() for problem in check(config, files))
    return files


def _check_model(config: RunConfig, files: PromptFiles) -> RunInputs:
    # A hub name may be downloaded here, so everything else has been checked.
    store, spec = open_store(config.storage, config.run.name), trained_model(config)
    # What was downloaded can be read, and it is not loaded yet.
    raise_all(check_model(config, files))
    spec = with_memory(config, spec)
    training, heldout = files.usable("data"), files.usable("evaluate")
    refuse_prompt_texts(config, files)
    return RunInputs(store, spec, training, heldout, (*files.notes, *code_notes(config)))


def _refuse_stored_settings(config: RunConfig, stored: LoraSettings | None) -> None:
    """Refuse an adapter whose own settings contradict the configuration, as those of `policy.lora` would."""
    if config.policy.adapter is None or stored is None:
        return
    policy = config.policy.model_copy(update={"lora": LoraSection(**asdict(stored))})
    raise_all(contradictions(config.model_copy(update={"policy": policy})))
