"""Combinations that cannot be: each field is allowed, together they are not."""

from collections.abc import Callable, Iterator

from configs.core_settings import advantage_settings, loss_settings, optimizer_settings, with_total_steps
from configs.dataset_checks import dataset_contradictions
from configs.reward_checks import reward_contradictions
from configs.schema import RunConfig
from grpo_core.errors import InputError
from grpo_core.optimizer.schedule import WITH_LENGTH
from grpo_core.policies.family import policy_family


def contradictions(config: RunConfig) -> list[InputError]:
    """Every impossible combination of a configuration; nothing is read or loaded."""
    return [
        *dataset_contradictions(config),
        *reward_contradictions(config),
        *_core_settings(config),
        *_batches(config),
        *_policy(config),
        *_reference(config),
        *_schedule(config),
        *_placement(config),
    ]


def _core_settings(config: RunConfig) -> Iterator[InputError]:
    checks: tuple[Callable[[], object], ...] = (
        lambda: advantage_settings(config.advantages),
        lambda: loss_settings(config.update),
        lambda: optimizer_settings(with_total_steps(config)),
    )
    for check in checks:
        try:
            check()
        except InputError as error:
            yield error


def _batches(config: RunConfig) -> Iterator[InputError]:
    rows, minibatch = config.rows_per_iteration, config.update.minibatch_size
    if minibatch is not None and minibatch > rows:
        hint = f"An iteration has {rows} rows (rollout.prompts_per_iteration x rollout.group_size); use at most that."
        yield InputError("update.minibatch_size", minibatch, hint)
    if config.update.mask_truncated and policy_family(config.policy.kind).modality == "image":
        yield InputError("update.mask_truncated", True, "An image always has all its tokens; leave it out.")


def _policy(config: RunConfig) -> Iterator[InputError]:
    policy = config.policy
    if policy.lora is None and policy.dtype != "float32":
        hint = "Small steps round away in 16 bits when every weight is trained; use float32, or set policy.lora."
        yield InputError("policy.dtype", policy.dtype, hint)
    if policy.lora is not None and policy.frozen is not None:
        hint = "Adapters leave every weight of the model alone; set policy.lora to null, or leave this out."
        yield InputError("policy.frozen", policy.frozen, hint)
    if policy.autocast is not None and policy.dtype != "float32":
        hint = "It computes in 16 bits over float32 weights; set policy.dtype to float32, or leave this out."
        yield InputError("policy.autocast", policy.autocast, hint)


def _reference(config: RunConfig) -> Iterator[InputError]:
    reference = config.update.reference
    coefficients = {"update.kl_coef": config.update.kl_coef, "advantages.kl_coef": config.advantages.kl_coef}
    for place, value in coefficients.items():
        if value > 0 and reference.placement == "none":
            hint = "There is no KL without a reference; set update.reference.placement to auto, or this to 0."
            yield InputError(place, value, hint)
    if reference.refresh_every and not any(coefficients.values()):
        hint = "Nothing is measured against the reference; set update.kl_coef above 0, or this to 0."
        yield InputError("update.reference.refresh_every", reference.refresh_every, hint)
    if config.policy.lora is not None and reference.placement == "cpu":
        hint = "With adapters the reference is the model without them and takes no memory; set it to auto."
        yield InputError("update.reference.placement", "cpu", hint)


def _schedule(config: RunConfig) -> Iterator[InputError]:
    update = config.update
    if update.warmup_steps and update.lr_scheduler == "constant":
        hint = "It needs update.lr_scheduler: constant_with_warmup, or another that warms up."
        yield InputError("update.warmup_steps", update.warmup_steps, hint)
    if update.total_steps is not None and update.lr_scheduler not in WITH_LENGTH:
        hint = f"The schedule {update.lr_scheduler} does not depend on its length; leave it out."
        yield InputError("update.total_steps", update.total_steps, hint)


def _placement(config: RunConfig) -> Iterator[InputError]:
    placement, pooled = config.placement, any(section.pool for section in config.rewards)
    for name, where, known in (("rollouts", placement.rollouts, False), ("rewards", placement.rewards, pooled)):
        if where.shards > 1 and where.pool is None and not known:
            hint = f"Shards are done by the workers of a work pool; name it as placement.{name}.pool, or set this to 1."
            yield InputError(f"placement.{name}.shards", where.shards, hint)
    if config.storage.root.startswith("memory:") and pools_of(config):
        hint = "Workers cannot see the memory of this process; give a folder that they share, or a URL such as s3://."
        yield InputError("storage.root", config.storage.root, hint)


def pools_of(config: RunConfig) -> list[tuple[str, str]]:
    """Every work pool that a configuration names, with its place."""
    placement = config.placement
    stages = {name: getattr(placement, name).pool for name in ("rollouts", "rewards", "advantages", "update")}
    named = [(f"placement.{name}.pool", pool) for name, pool in stages.items()]
    sections = [(f"rewards.{index}.pool", section.pool) for index, section in enumerate(config.rewards)]
    guards = [(f"watch.guardrails.{index}.pool", each.pool) for index, each in enumerate(config.watch.guardrails)]
    return [(place, pool) for place, pool in (*named, *sections, *guards) if pool is not None]
