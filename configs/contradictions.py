"""Refuse combinations of settings that are valid only separately. Nothing is read or loaded."""

from collections.abc import Callable, Iterator, Sequence

from configs.rollouts import TextRolloutSection
from configs.schema import RunConfig
from configs.scoring import RewardSection
from configs.stream_contradictions import stream_contradictions
from configs.validation import contradictions_within, error_at
from grpo_core.advantages.settings import refuse_terms
from grpo_core.errors import InputError
from grpo_core.policies.engines.settings import refuse_adapters as refuse_vllm_adapters
from grpo_core.policies.protocol import policy_family
from grpo_core.policies.trained.quantization import refuse_adapters
from grpo_core.rewards.registry import build_reward
from grpo_core.update.optimizer_kinds import OPTIMIZERS

MASKED = ("sdpa", "eager")
"""Implementations of attention that take a mask of any form."""

MANIFEST_ENDING = ".manifest.json"
"""Ending of the file next to a stored table, whose folder has the reward's name."""


def contradictions(config: RunConfig) -> list[InputError]:
    """Return every refused combination of a configuration whose sections are valid."""
    return [
        *contradictions_within(config),
        *_datasets(config),
        *_share(config),
        *_sizes(config),
        *_images(config),
        *_messages(config),
        *reward_contradictions(config),
        *stream_contradictions(config),
        *_batches(config),
        *_quantization(config),
        *_engine(config),
        *_cache(config),
        *_memory(config),
        *_reference(config),
        *_schedule(config),
        *_placement(config),
    ]


def _datasets(config: RunConfig) -> Iterator[InputError]:
    """Yield datasets that rewards name and that are not there, and those that no reward scores; nothing is read."""
    known = sorted({each.name for _, each in config.datasets})
    for index, reward in enumerate(config.rewards):
        for name in reward.datasets or ():
            if name not in known:
                hint = f"There is no such dataset; there is {', '.join(known) or 'none'}."
                yield InputError(f"rewards.{index}.datasets", name, hint)
    weighted = [reward for reward in config.rewards if reward.weight]
    for place, section in config.prompt_sections.items():
        for each in section.sets if weighted else ():
            if not any(reward.scores(each.name) for reward in weighted):
                hint = "No reward with a weight scores this dataset; add its name to the datasets of a reward."
                yield InputError(f"{place}.datasets" if section.datasets else f"{place}.prompts", each.name, hint)


def _share(config: RunConfig) -> Iterator[InputError]:
    """Yield a share that is to be held out of other prompts than those of the training."""
    if config.evaluate.share is not None and config.evaluate.sets != config.data.sets:
        hint = "It is a share of data's prompts: leave it out, or prompts, limit and others of their keys in evaluate."
        yield InputError("evaluate.share", config.evaluate.share, hint)


def _sizes(config: RunConfig) -> Iterator[InputError]:
    """Yield every size of a dataset that is half given, or given to texts."""
    for where, dataset in config.datasets:
        given = {name: value for name in ("width", "height") if (value := getattr(dataset, name)) is not None}
        for name, value in given.items():
            if policy_family(config.policy.kind).modality == "text":
                yield InputError(f"{where}.{name}", value, "Texts have no size; leave it out.")
            elif len(given) == 1:
                yield InputError(f"{where}.{name}", value, "Give width and height, or neither for the rollout's.")


def _images(config: RunConfig) -> Iterator[InputError]:
    """Yield every bound of images in prompts where no column has any."""
    for where, dataset in config.datasets:
        read = dataset.image_column is not None or policy_family(config.policy.kind).reads_images
        if dataset.max_image_pixels is not None and not read:
            hint = "No images are read from these prompts; name their image_column, or leave this out."
            yield InputError(f"{where}.max_image_pixels", dataset.max_image_pixels, hint)


def _messages(config: RunConfig) -> Iterator[InputError]:
    """Yield every set of prompts that are messages for a model that takes one text."""
    for where, dataset in config.datasets:
        roles = dataset.prompt_column
        if isinstance(roles, str | None):
            continue
        if policy_family(config.policy.kind).modality != "text":
            yield InputError(f"{where}.prompt_column", roles, "An image's prompt is one text; name one column.")
        elif not roles:
            yield InputError(f"{where}.prompt_column", roles, "Give a column for at least one role, such as user.")


def reward_contradictions(config: RunConfig) -> Iterator[InputError]:
    """Yield every refused reward or guardrail, and every refused combination; nothing is read or loaded."""
    yield from _labels("rewards", config.rewards)
    try:
        refuse_terms(config.rewards, config.advantages)
    except InputError as error:
        yield error
    else:
        yield from _streams(config)
    for index, section in enumerate(config.rewards):
        yield from _reward(config, section, f"rewards.{index}", ("data", "evaluate"))
    yield from _guardrails(config)


def _streams(config: RunConfig) -> Iterator[InputError]:
    """Yield every stream of a reward that is not trained, and every trained stream without a reward."""
    trained = ", ".join(config.streams)
    for index, section in enumerate(config.rewards):
        for stream in section.streams or ():
            if stream not in config.streams:
                hint = f"The run trains {trained} only; leave it out, or train it too with policy.train."
                yield InputError(f"rewards.{index}.streams", stream, hint)
    for stream in config.streams:
        own = [section for section in config.rewards if section.counts_for(stream)]
        if not any(section.role == "sum" and section.weight for section in own):
            hint = f"None is added with a weight other than 0 for {stream}, which the run trains; add {stream} to one."
            yield InputError("rewards.streams", [section.label for section in own], hint)


def _labels(place: str, sections: Sequence[RewardSection]) -> Iterator[InputError]:
    labels = [section.label for section in sections]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield InputError(place, label, "This name appears twice; give each entry a different `name`.")
    for label in (label for label in labels if label.endswith(MANIFEST_ENDING)):
        yield InputError(place, label, f"Manifests of stored tables end with {MANIFEST_ENDING}; choose another name.")


def _reward(config: RunConfig, section: RewardSection, place: str, parts: Sequence[str]) -> Iterator[InputError]:
    modality = policy_family(config.policy.kind).modality
    try:
        reward = build_reward(section.reward, section.settings)
    except InputError as error:
        yield InputError(_place_in(place, section, error.place), error.value, error.hint)
        return
    if modality not in reward.needs.media:
        scored = " or ".join(f"{each}s" for each in reward.needs.media)
        hint = f"It scores {scored}, and policy.kind {config.policy.kind} generates {modality}s."
        yield InputError(f"{place}.reward", section.reward, hint)
        return
    if reward.needs.target:
        yield from _targets(config, section, place, parts)
    if reward.needs.source is not None and not policy_family(config.policy.kind).reads_images:
        yield from _sources(config, section, place, parts)


def _place_in(place: str, section: RewardSection, found: str) -> str:
    """Return where the configuration has what a reward refused: its name, a setting, or a place within a file."""
    if found == "rewards":
        return f"{place}.reward"
    setting = found.removeprefix(f"rewards.{section.reward}")
    return f"{place}.settings{setting}" if setting != found else f"{place}: {found}"


def _targets(config: RunConfig, section: RewardSection, place: str, parts: Sequence[str]) -> Iterator[InputError]:
    for part in parts:
        for where, dataset in config.prompt_sections[part].placed(part):
            if section.scores(dataset.name) and not (dataset.targets or dataset.target_column):
                hint = f"It compares with a target image: set {where}.targets or {where}.target_column."
                yield InputError(f"{place}.reward", section.reward, hint)


def _sources(config: RunConfig, section: RewardSection, place: str, parts: Sequence[str]) -> Iterator[InputError]:
    for part in parts:
        for where, dataset in config.prompt_sections[part].placed(part):
            if section.scores(dataset.name) and dataset.image_column is None:
                hint = f"It compares with an image in the prompt: set {where}.image_column."
                yield InputError(f"{place}.reward", section.reward, hint)


def _guardrails(config: RunConfig) -> Iterator[InputError]:
    guardrails = config.guardrails
    yield from _labels("guardrails.rewards", guardrails.rewards)
    for index, section in enumerate(guardrails.rewards):
        place = f"guardrails.rewards.{index}"
        # Guardrails score only held-out samples.
        yield from _reward(config, section, place, ("evaluate",))
    if guardrails.rewards and not config.evaluate.sets:
        hint = "They are scored on held-out samples; set evaluate.prompts, or leave them out."
        yield InputError("guardrails.rewards", [section.label for section in guardrails.rewards], hint)
    if guardrails.on_fall != "report" and guardrails.rewards and not config.evaluate.every:
        hint = "Only the first and the last policy are evaluated; set evaluate.every, or leave it out."
        yield InputError("guardrails.on_fall", guardrails.on_fall, hint)


def _batches(config: RunConfig) -> Iterator[InputError]:
    for stream, update in config.updates.items():
        rows = config.rows_of(stream)
        # Without rows the settings that leave none are reported.
        for name, given in (("minibatch_size", update.minibatch_size), ("minibatches", update.minibatches)):
            if given is not None and 0 < rows < given:
                hint = f"An iteration trains on {rows} rows of {stream}; use at most that."
                yield InputError(f"{config.update_path(stream)}.{name}", given, hint)


def _quantization(config: RunConfig) -> Iterator[InputError]:
    policy, quantization = config.policy, config.policy.quantization
    if quantization is None:
        return
    if not policy.trains_adapters:
        yield from _refused(refuse_adapters, quantization, None)
    for place, lora in policy.loras.items():
        yield from _refused(refuse_adapters, quantization, lora, f"policy.{place}")
    if config.placement.sharding == "fsdp2":
        hint = "Quantized weights are not sharded here; set it to ddp, in which each process has all of them."
        yield InputError("placement.sharding", "fsdp2", hint)


def _engine(config: RunConfig) -> Iterator[InputError]:
    policy, rollout = config.policy, config.rollout
    if not isinstance(rollout, TextRolloutSection) or rollout.engine == "policy":
        return
    if policy.kind == "vision_lm" and not policy.freeze_vision:
        hint = "A vLLM server loads adapters of the language model alone here; use true, or rollout.engine: policy."
        yield InputError("policy.freeze_vision", False, hint)
    if not policy.trains_adapters:
        hint = "A vLLM server takes new full weights over NCCL alone. Train adapters, or use rollout.engine: policy."
        yield InputError("policy.lora", None, hint)
    if policy.quantization is not None:
        hint = "A server loads the base in its own way, with other weights; use rollout.engine: policy."
        yield InputError("policy.quantization", policy.quantization.model_dump(exclude_defaults=True), hint)
    command, placement = rollout.vllm and rollout.vllm.command, config.placement
    # Reference log-probs take the weights, so the devices' processes sample.
    if command and config.advantages.kl_coef > 0 and placement.shards_of(placement.rollouts) > 1:
        hint = "Each process of advantages.kl_coef would start one. Name a rollout.vllm.url, or use one device."
        yield InputError("rollout.vllm.command", command, hint)
    if command and config.run.staleness and placement.rollouts.timeout and not placement.rollouts.pool:
        hint = "Each process of placement.rollouts.timeout would start one. Leave that out, or name rollout.vllm.url."
        yield InputError("rollout.vllm.command", command, hint)
    for place, lora in policy.loras.items():
        yield from _refused(refuse_vllm_adapters, lora, f"policy.{place}")


def _cache(config: RunConfig) -> Iterator[InputError]:
    """Yield attention that takes no mask over a static cache."""
    attention = config.policy.attn_implementation
    if getattr(config.rollout, "cache_implementation", "dynamic") == "static" and attention not in (None, *MASKED):
        hint = f"{attention} takes no mask over a static cache; use sdpa, or rollout.cache_implementation: dynamic."
        yield InputError("policy.attn_implementation", attention, hint)


def _memory(config: RunConfig) -> Iterator[InputError]:
    policy, sharded = config.policy, config.placement.sharding == "fsdp2"
    if policy.offload != "none" and sharded:
        hint = "With fsdp2 each process has a share of the weights on its GPU; use none, or placement.sharding ddp."
        yield InputError("policy.offload", policy.offload, hint)
    for stream, update in config.updates.items():
        place = f"{config.update_path(stream)}.offload_optimizer"
        if update.offload_optimizer and sharded:
            yield InputError(place, True, "Sharded moments stay on the GPUs; leave it out, or use ddp.")
        if OPTIMIZERS[update.optimizer].matrices and policy.lora_of(stream) is None and policy.adapter is None:
            hint = "It has steps for matrices only, and a whole model has other weights: set policy.lora, or use adamw."
            yield InputError(f"{config.update_path(stream)}.optimizer", update.optimizer, hint)


def _refused(check: Callable[..., object], *arguments: object) -> Iterator[InputError]:
    try:
        check(*arguments)
    except InputError as error:
        yield error


def _reference(config: RunConfig) -> Iterator[InputError]:
    for stream, update in config.updates.items():
        place, reference = config.update_path(stream), update.reference
        coefficients = {f"{place}.kl_coef": update.kl_coef, "advantages.kl_coef": config.advantages.kl_coef}
        for where, value in coefficients.items():
            if value > 0 and reference.placement == "none":
                hint = f"There is no KL without a reference; set {place}.reference.placement to auto, or this to 0."
                yield InputError(where, value, hint)
        if reference.refresh_every and not any(coefficients.values()):
            hint = f"Nothing uses the reference; set {place}.kl_coef above 0, or this to 0."
            yield InputError(f"{place}.reference.refresh_every", reference.refresh_every, hint)
        if config.policy.trains_adapters and reference.placement == "cpu":
            hint = "With adapters the reference takes no memory, or that of the adapters; set it to auto."
            yield InputError(f"{place}.reference.placement", "cpu", hint)


def _schedule(config: RunConfig) -> Iterator[InputError]:
    for stream, update in config.scheduled_updates.items():
        try:
            update.schedule()
        except InputError as error:
            yield error_at(config.update_path(stream), error)


def _placement(config: RunConfig) -> Iterator[InputError]:
    placement, pooled = config.placement, any(section.pool for section in config.rewards)
    for place, lora in config.policy.loras.items():
        if placement.sharding == "fsdp2" and (lora.use_dora or lora.modules_to_save):
            hint = f"policy.{place}.use_dora and modules_to_save need the whole model in each process; set it to ddp."
            yield InputError("placement.sharding", "fsdp2", hint)
    yield from _devices(config)
    for name, where, known in (("rollouts", placement.rollouts, False), ("rewards", placement.rewards, pooled)):
        if (where.shards or 1) > 1 and where.pool is None and not known and not placement.names_devices_here:
            hint = f"Shards run on several devices or on a pool; set placement.devices or {name}.pool, or this to 1."
            yield InputError(f"placement.{name}.shards", where.shards, hint)
    if config.storage.root.startswith("memory:") and pools_of(config):
        hint = "Workers cannot access the memory of this process; give a shared folder, or a URL such as s3://."
        yield InputError("storage.root", config.storage.root, hint)


def _devices(config: RunConfig) -> Iterator[InputError]:
    indices = [each for each in config.placement.devices if isinstance(each, int)]
    placed = {f"rewards.{index}": section for index, section in enumerate(config.rewards)}
    placed |= {f"guardrails.rewards.{index}": section for index, section in enumerate(config.guardrails.rewards)}
    for place, section in placed.items():
        device = str(section.settings.get("device", ""))
        if indices and device.startswith("cuda:") and not (section.pool or config.placement.rewards.pool):
            hint = "The process that scores sees the one GPU that placement.devices gives it; set it to cuda."
            yield InputError(f"{place}.settings.device", device, hint)


def pools_of(config: RunConfig) -> list[tuple[str, str]]:
    """Return every work pool that a configuration names, with its place."""
    placement = config.placement
    stages = {name: getattr(placement, name).pool for name in ("rollouts", "rewards", "advantages", "update")}
    named = [(f"placement.{name}.pool", pool) for name, pool in stages.items()]
    sections = [(f"rewards.{index}.pool", section.pool) for index, section in enumerate(config.rewards)]
    guards = [(f"guardrails.rewards.{index}.pool", each.pool) for index, each in enumerate(config.guardrails.rewards)]
    return [(place, pool) for place, pool in (*named, *sections, *guards) if pool is not None]
