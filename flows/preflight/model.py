"""Checks of the model that a run trains, and of the devices and processes that it runs on."""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Literal

import torch

from configs.rollouts import ImageRolloutSection
from configs.schema import RunConfig
from configs.training import UpdateSection
from configs.validation import error_at
from flows.preflight.prompts import PromptFiles, first_of, sizes_of
from grpo_core.errors import InputError, joined
from grpo_core.policies.estimate import BYTES, MemoryEstimate, ModelEstimate, Workload, estimate_resources
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.component import refuse_unavailable_attention
from grpo_core.policies.trained.offload import refuse_too_little_room
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rewards.model_reward import ModelReward
from grpo_core.rewards.registry import build_reward
from grpo_core.rollouts.streams import ImageSize, Stream
from grpo_core.seeds import derive_seed
from grpo_core.update.optimizer import refuse_unavailable
from grpo_core.update.optimizer_kinds import OPTIMIZERS
from grpo_core.update.settings import StepSettings
from grpo_core.update.velocity_settings import VelocitySettings
from tasks.models.devices import refuse_missing_devices, torch_device
from tasks.models.initial import initial_digest, local_source, training_choices
from tasks.models.resident import ModelSpec
from tasks.runs.stored_policies import adapter_version
from tasks.storage.artifacts.store import open_store
from tasks.update.job import refuse_unequal_sources, refuse_unusable_placement
from tasks.update.machines import machine_count


def check_model(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report missing files, settings that the model cannot sample with, and sizes that it cannot generate."""
    family = policy_family(config.policy.kind)
    try:
        family.refuse_missing(source_of(config))
        family.refuse_unusable(source_of(config), config.rollout)
        _refuse_previews(config)
        _refuse_evaluation(config)
        _refuse_quantization(config)
        if any(isinstance(each, VelocitySettings) and not each.with_reference for each in config.updates.values()):
            family.refuse_without_pull(source_of(config), config.rollout)
    except InputError as error:
        yield error
        return
    yield from _size_problems(config, prompts)


def _refuse_previews(config: RunConfig) -> None:
    """Raise InputError if the model cannot sample in the steps of previews, by which alone they differ."""
    rollout = config.rollout
    if not isinstance(rollout, ImageRolloutSection) or rollout.previews is None:
        return
    try:
        policy_family(config.policy.kind).refuse_unusable(source_of(config), rollout.for_previews())
    except InputError as error:
        raise InputError("rollout.previews.steps", error.value, error.hint) from error


def _refuse_evaluation(config: RunConfig) -> None:
    """Raise InputError if the model cannot sample held-out prompts with the settings that only they have."""
    try:
        policy_family(config.policy.kind).refuse_unusable(source_of(config), config.evaluation_rollout)
    except InputError as error:
        field = error.place.removeprefix("rollout.")
        own = any(getattr(config.evaluate, each, None) is not None for each in field.split(" and "))
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


def refuse_offload_without_room(config: RunConfig, memory: MemoryEstimate) -> None:
    """Raise InputError if what is offloaded on this machine has no room in CPU memory."""
    placement = config.placement
    # What a worker's machine has is found out there.
    if config.policy.offload == "components" and not (placement.rollouts.pool or placement.update.pool):
        # Each process has its own.
        copies = {name: count * len(placement.devices) for name, count in memory.offloaded.items()}
        refuse_too_little_room(copies)


def _size_problems(config: RunConfig, prompts: PromptFiles) -> list[InputError]:
    refuse = policy_family(config.policy.kind).refuse_unusable
    source = source_of(config)
    problems = []
    for size, where in sizes_of(config, prompts, prompts.sets):
        try:
            refuse(source, config.rollout.model_copy(update=size._asdict()))
        except InputError as error:
            problems.append(InputError(where, str(size), error.hint))
    return first_of(problems)


def refuse_prompt_texts(config: RunConfig, files: PromptFiles) -> int | None:
    """Refuse prompts that the model cannot read, by file and row; only its tokenizer is loaded.

    Returned are the ids of the longest prompt; None where they decide no memory.
    """
    family = policy_family(config.policy.kind)
    read = [
        (prompt, f"{own}.prompts: {dataset.prompts}, row {row}")
        for part, sets in files.sets.items()
        for (own, dataset), known in zip(config.prompt_sections[part].placed(part), sets, strict=True)
        for row, prompt in enumerate(known.prompts if known is not None else (), start=1)
    ]
    images = [[source.size for source in prompt.sources] for prompt, _ in read]
    texts = [prompt.text for prompt, _ in read]
    try:
        return family.refuse_prompts(source_of(config), config.rollout, texts, images if any(images) else ())
    except InputError as error:
        named = partial(re.sub, r"\bprompt (\d+)", lambda match: read[int(match[1]) - 1][1])
        found = [InputError(named(each.place), each.value, each.hint) for each in error.errors]
        raise joined(first_of(found, "prompts")) from error


def trained_model(config: RunConfig) -> ModelSpec:
    """Describe the model that a run trains; a hub name may be downloaded."""
    adapter = adapter_version(config)
    return ModelSpec(
        section=config.policy,
        digest=initial_digest(config.policy, open_store(config.storage, config.run.name), adapter),
        adapter_seed=derive_seed(config.run.seed, "adapter"),
        references=config.references,
        adapter=adapter,
    )


def estimate_model(
    config: RunConfig,
    choices: Mapping[Stream, TrainingChoice],
    sizes: tuple[ImageSize, ...] = (),
    *,
    offload: bool | None = None,
    longest: int | None = None,
) -> ModelEstimate:
    """Estimate the memory of one GPU for images of these sizes, or of the rollout's, and the size of a checkpoint.

    Args:
        offload: whether components are offloaded; None: as configured, which with `auto` means not.
        longest: ids of the longest prompt; None: an assumed number.
    """
    images = config.images_of_samples
    compared: Mapping[Stream, int] = {"tokens": len(images), "denoising": max(images)}
    workloads = {
        stream: Workload(
            dtype=config.policy.dtype,
            autocast=config.policy.autocast,
            group_size=compared[stream],
            prompts_per_batch=config.rollout.prompts_per_batch,
            micro_batch_size=update.micro_batch_size,
            eight_bit_optimizer=update.optimizer.endswith("8bit"),
            moments=OPTIMIZERS[update.optimizer].moments,
            averages=(update.ema is not None) + bool(update.old_policy_decay(1)),
            sizes=sizes,
            offload_optimizer=update.offload_optimizer,
            prompts=_prompts_of_a_microbatch(config, stream, update),
            backward_per_step=isinstance(update, UpdateSection) and update.backward_per_step,
        )
        for stream, update in config.updates.items()
    }
    moved = config.policy.offload == "components" if offload is None else offload
    return estimate_resources(
        config.policy.kind,
        source_of(config),
        config.rollout,
        choices,
        workloads,
        offload=moved,
        longest=longest,
        reward_models=reward_model_bytes(config),
    )


def _prompts_of_a_microbatch(config: RunConfig, stream: Stream, update: StepSettings) -> int:
    """Return how many prompts the rows of a microbatch have at most; 0 where each row computes its own."""
    if stream != "tokens" or config.placement.sharding == "fsdp2":
        return 0
    rows, group = config.rows_of("tokens"), len(config.images_of_samples)
    # The rows of a step are drawn from all: of several, siblings are scattered.
    whole = update.rows_per_step(rows) == rows
    return -(-update.micro_batch_size // group) if whole else config.rollout.prompts_per_iteration


def reward_model_bytes(config: RunConfig, devices: Collection[str] = ("cuda", "cuda:0")) -> int:
    """Return what the networks of rewards with these devices take of the policy's GPU; those not here are 0."""
    found: dict[tuple[str, str], int] = {}
    for section in (*config.rewards, *config.guardrails.rewards):
        reward = build_reward(section.reward, section.settings)
        apart = "cpu" in config.placement.devices or section.pool or config.placement.rewards.pool
        # A process has its policy on the first GPU that it sees.
        if isinstance(reward, ModelReward) and reward.device in devices and not apart:
            for weights in reward.weight_sources().values():
                for file, values in weights.values().items():
                    # A process loads a file once for all rewards of one precision.
                    taken = BYTES[reward.dtype] * values * max(1, section.processes)
                    found[file, reward.dtype] = max(found.get((file, reward.dtype), 0), taken)
    return sum(found.values())


def reward_device(config: RunConfig, needed: int) -> Literal["auto", "cpu"]:
    """Return where rewards of device auto run beside a policy that needs so many bytes: auto is its GPU."""
    if "cpu" in config.placement.devices:
        return "cpu"
    wanted = reward_model_bytes(config, ["auto"])
    if not wanted or not torch.cuda.is_available():
        return "auto"
    return "auto" if needed + wanted <= torch.cuda.mem_get_info()[1] else "cpu"


def with_memory(config: RunConfig, spec: ModelSpec) -> ModelSpec:
    """Add the memory by which a process decides about offloading and steps; refuse to offload without room.

    With it comes where rewards of device auto run.
    """
    wanted, offload = reward_model_bytes(config, ["auto"]), config.policy.offload
    if offload == "none" and not wanted and not any(update.chooses_steps for update in config.updates.values()):
        return spec.model_copy(update={"reward_device": reward_device(config, 0)})
    store = open_store(config.storage, config.run.name) if spec.adapter else None
    with training_choices(config.policy, store, spec.adapter, references=config.references) as choices:
        kept, moved = (estimate_model(config, choices, offload=each).memory for each in (False, offload != "none"))
    refuse_offload_without_room(config, moved)
    least = kept.one_by_one().needed
    offloads = spec.model_copy(update={"memory": least}).offloads(torch_device(config.placement))
    beside = reward_device(config, (moved if offloads else kept).one_by_one().needed)
    more = wanted if beside == "auto" else 0
    of_window = (kept.needed + more, moved.needed + more)
    return spec.model_copy(update={"memory": least + more, "of_window": of_window, "reward_device": beside})


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
    """Report a loss of the person's own that cannot be imported, and prompts that processes cannot share."""
    trained = (prompt for each in prompts.usable("data") for prompt in each.prompts)
    try:
        refuse_unequal_sources(config.placement, config.updates, (len(prompt.sources) for prompt in trained))
    except InputError as error:
        yield error
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
