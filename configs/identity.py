"""What identifies a run: the settings that determine its policies and rollouts, and how those of two runs differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from configs.schema import RunConfig
from grpo_core.update.settings import WITH_LENGTH

_STAGES = ("policy", "data", "rollout", "advantages", "update")


def run_identity(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine the policies and rollouts of a run, as JSON values.

    Memory, placement, storage, evaluation and guardrails are left out, and so is the number of iterations, unless the
    learning rate schedule depends on it: otherwise more iterations only continue the run.
    """
    run = config.run
    bound = any(update.total_steps is None and update.lr_scheduler in WITH_LENGTH for update in config.updates.values())
    return {
        **{name: getattr(config, name).result_settings() for name in _STAGES},
        "run": {"seed": run.seed, "staleness": run.staleness, **({"iterations": run.iterations} if bound else {})},
        # Keyed by label, so that a reported change names the reward.
        "rewards": {section.label: section.result_settings() for section in config.rewards},
    }


def changed_settings(previous: Mapping[str, Any], current: Mapping[str, Any], path: str = "") -> Sequence[str]:
    """Return `section.key was -> is` for every value that differs; a complete section is added or removed."""
    changes: list[str] = []
    for key in sorted({*previous, *current}):
        was, now = previous.get(key), current.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            changes += changed_settings(was, now, f"{path}{key}.")
        elif isinstance(was, Mapping) and now is None:
            changes.append(f"{path}{key} removed")
        elif isinstance(now, Mapping) and was is None:
            changes.append(f"{path}{key} added")
        elif was != now:
            changes.append(f"{path}{key} {was} -> {now}")
    return changes
