"""Checks of the model that a run trains, and of the devices and processes that it runs on."""

from collections.abc import Iterator, Sequence
from functools import partial

from configs.schema import RunConfig
from configs.validation import error_at
from flows.preflight.prompts import PromptFiles, first_of, sizes_of
from grpo_core.errors import InputError
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.component import refuse_unavailable_attention
from grpo_core.seeds import derive_seed
from grpo_core.update.optimizer import refuse_unavailable
from tasks.models.initial import initial_digest, local_source
from tasks.models.resident import ModelSpec, refuse_missing_devices, torch_device
from tasks.prompts.curriculum import PromptSet
from tasks.runs.stored import adapter_version
from tasks.storage.artifacts.store import open_store
from tasks.update.job import refuse_unusable_placement
from tasks.update.machines import machine_count


def check_model(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report missing files, settings that the model cannot sample with, and sizes that it cannot generate."""
    family = policy_family(config.policy.kind)
    try:
        family.refuse_missing(source_of(config))
        family.refuse_unusable(source_of(config), config.rollout)
        _refuse_evaluation(config)
        _refuse_quantization(config)
    except InputError as error:
        yield error
        return
    yield from _size_problems(config, prompts)


def _refuse_evaluation(config: RunConfig) -> None:
    """Raise InputError if the model cannot sample held-out prompts with the settings that only they have."""
    try:
        policy_family(config.policy.kind).refuse_unusable(source_of(config), config.evaluation_rollout)
    except InputError as error:
        field = error.place.removeprefix("rollout.")
        own = getattr(config.evaluate, field, None) is not None
        raise InputError(f"evaluate.{field}" if own else error.place, error.value, error.hint) from error


def _refuse_quantization(config: RunConfig) -> None:
    """Raise InputError if the weights cannot be quantized as configured, or are stored quantized and are trained."""
    policy, placement = config.policy, config.placement
    # What a worker's machine can run is refused there.
    if not placement.update.pool:
        policy_family(policy.kind).refuse_quantization(
            source_of(config),
            policy.quantization,
            policy.streams,
            torch_device(placement),
            adapters=policy.trains_adapters,
        )


def _size_problems(config: RunConfig, prompts: PromptFiles) -> list[InputError]:
    """Return an error for each size that the model cannot generate, with the nearest that it can."""
    refuse = policy_family(config.policy.kind).refuse_unusable
    source = source_of(config)
    problems = []
    for size, where in sizes_of(config, prompts, prompts.sets):
        try:
            refuse(source, config.rollout.model_copy(update=size._asdict()))
        except InputError as error:
            problems.append(InputError(where, str(size), error.hint))
    return first_of(problems)


def refuse_prompt_texts(config: RunConfig, sets: Sequence[PromptSet]) -> None:
    """Raise InputError when the model cannot read one of the prompts; only its tokenizer is loaded."""
    family = policy_family(config.policy.kind)
    prompts = [prompt for each in sets for prompt in each.prompts]
    images = [[source.size for source in prompt.sources] for prompt in prompts]
    texts = [prompt.text for prompt in prompts]
    family.refuse_prompts(source_of(config), config.rollout, texts, images if any(images) else ())


def trained_model(config: RunConfig) -> ModelSpec:
    """Describe the model that a run trains; a hub name may be downloaded.

    Raises:
        InputError: its files, or those of its adapter, cannot be found.
    """
    adapter = adapter_version(config)
    return ModelSpec(
        section=config.policy,
        digest=initial_digest(config.policy, open_store(config.storage, config.run.name), adapter),
        adapter_seed=derive_seed(config.run.seed, "adapter"),
        references=config.references,
        adapter=adapter,
    )


def source_of(config: RunConfig) -> str:
    """Return the folder or hub name that the model is loaded from."""
    return local_source(config.policy.model, config.policy.revision)


EXTRAS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
"""Trackers for which this package has an extra; it has the name of the tracker."""


def check_device(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report what this machine lacks for the stages that run on it."""
    placement = config.placement
    if placement.rollouts.pool and placement.update.pool:
        # The devices are those of the workers, which report when one is missing.
        return
    try:
        refuse_missing_devices(placement.devices)
    except InputError as error:
        yield error
        return
    if placement.update.pool:
        # The rest depends on the worker's machine.
        return
    checks = [
        partial(refuse_unavailable_attention, config.policy.attn_implementation),
        partial(refuse_unusable_placement, placement, config.updates, machine_count()),
    ]
    for check in checks:
        try:
            check()
        except InputError as error:
            yield error
    for stream, update in config.updates.items():
        try:
            refuse_unavailable(update.optimizer, torch_device(placement))
        except InputError as error:
            yield error_at(config.update_path(stream), error)


def check_update(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report a loss of the person's own that cannot be imported."""
    for stream, update in config.updates.items():
        try:
            # It imports the function.
            _ = update.custom_loss
        except InputError as error:
            yield error_at(config.update_path(stream), error)


def check_trackers(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report trackers that accelerate does not know, or whose package is not installed."""
    if not config.run.trackers:
        return
    # It imports torch, which a command without trackers may not need yet.
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    missing = {str(name) for name in LoggerType} - {str(name) for name in get_available_trackers()}
    # Those that a program has registered need no package.
    installed = sorted({*LOGGER_TYPE_TO_CLASS} - missing)
    here = f"Installed here: {', '.join(installed) or 'none'}."
    for index, name in enumerate(config.run.trackers):
        if name in installed:
            continue
        if name in LOGGER_TYPE_TO_CLASS:
            package = {"mlflow": "mlflow-skinny"}.get(name, name)
            extra = f", which the extra {name} of this package brings" if name in EXTRAS else ""
            hint = f"Its package is missing: `uv pip install {package}`{extra}. {here}"
        else:
            hint = f"There is no such tracker; choose among {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}. {here}"
        yield InputError(f"run.trackers.{index}", name, hint)
