"""The settings that determine the results of a run, and how two runs differ in them."""

from collections.abc import Mapping, Sequence
from typing import Any

from configs.schema import RunConfig
from grpo_core.optimizer.settings import WITH_LENGTH

_STAGES = ("policy", "data", "rollout", "advantages", "update")


def run_identity(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine the policies and rollouts of a run, as JSON values.

    Memory, placement, storage, evaluation and guardrails are left out, and so is the number of iterations, unless the
    learning rate schedule depends on it: otherwise more iterations only continue the run.
    """
    run = config.run
    bound = config.update.total_steps is None and config.update.lr_scheduler in WITH_LENGTH
    return {
        **{name: getattr(config, name).result_settings() for name in _STAGES},
        "run": {"seed": run.seed, "staleness": run.staleness, **({"iterations": run.iterations} if bound else {})},
        # Keyed by label, so that a reported change names the reward.
        "rewards": {section.label: section.result_settings() for section in config.rewards},
    }


def changed_settings(previous: Mapping[str, Any], current: Mapping[str, Any], path: str = "") -> Sequence[str]:
    """Return `section.key was -> is` for every value that differs."""
    changes: list[str] = []
    for key in sorted({*previous, *current}):
        was, now = previous.get(key), current.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            changes += changed_settings(was, now, f"{path}{key}.")
        elif was != now:
            changes.append(f"{path}{key} {was} -> {now}")
    return changes
