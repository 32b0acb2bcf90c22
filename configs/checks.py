"""Combinations that cannot be: each field is allowed, together they are not."""

from collections.abc import Iterator

from configs.schema import RunConfig
from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward


def contradictions(config: RunConfig) -> list[InputError]:
    """Every impossible combination of a configuration; nothing is read or loaded."""
    return [*_rewards(config), *_batches(config)]


def _rewards(config: RunConfig) -> Iterator[InputError]:
    labels = [reward.label for reward in config.rewards]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield InputError("rewards", label, "This name stands twice; give each entry a `name` of its own.")
    if not any(reward.weight for reward in config.rewards):
        weights = [reward.weight for reward in config.rewards]
        yield InputError("rewards", weights, "Every weight is 0, so nothing would be learned; give one a weight.")
    for index, section in enumerate(config.rewards):
        try:
            reward = build_reward(section.reward, section.settings)
        except InputError as error:
            yield InputError(f"rewards.{index}: {error.place}", error.value, error.mend)
            continue
        if not reward.needs_target:
            continue
        for part, data in (("data", config.data), ("evaluate", config.evaluate)):
            if data.prompts and not (data.targets or data.target_column):
                mend = f"It compares with a target picture: set {part}.targets or {part}.target_column."
                yield InputError(f"rewards.{index}.reward", section.reward, mend)


def _batches(config: RunConfig) -> Iterator[InputError]:
    rows, minibatch = config.rows_per_iteration, config.update.minibatch_size
    if minibatch is not None and minibatch > rows:
        mend = f"An iteration has {rows} rows (rollout.prompts_per_iteration x rollout.group_size); use at most that."
        yield InputError("update.minibatch_size", minibatch, mend)
    if config.policy.lora is None and config.policy.dtype != "float32":
        mend = "Small steps round away in 16 bits when every weight is trained; use float32, or set policy.lora."
        yield InputError("policy.dtype", config.policy.dtype, mend)
    if config.update.warmup_steps and config.update.lr_scheduler == "constant":
        mend = "It needs update.lr_scheduler: constant_with_warmup."
        yield InputError("update.warmup_steps", config.update.warmup_steps, mend)
