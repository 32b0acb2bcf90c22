"""What of a configuration determines the policies and rollouts of a run, and what differs between two of them.

Both take configurations as they were stored, which may be damaged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core.optimizer.schedule import WITH_LENGTH

# What may change without making another training run of it.
_FREE_SECTIONS = ("evaluate", "placement", "storage", "watch")
_FREE_OF_REWARDS = ("max_failures", "batch_size", "processes", "pool")


def determining(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sections and values that do; more iterations only go on with a run."""
    values = {section: content for section, content in config.items() if section not in _FREE_SECTIONS}
    run = _section(config, "run")
    # A schedule that ends with the run is another one when the run is longer.
    update = _section(config, "update")
    bound = update.get("total_steps") is None and str(update.get("lr_scheduler")) in WITH_LENGTH
    return {
        **values,
        "run": {
            "seed": run.get("seed"),
            "staleness": run.get("staleness", 0),
            **({"iterations": run.get("iterations")} if bound else {}),
        },
        # By name, so that a change is told in few words.
        "rewards": {str(each.get("name") or each.get("reward")): _of_reward(each) for each in _rewards(config)},
    }


def changed_keys(previous: Mapping[str, Any], present: Mapping[str, Any], path: str = "") -> Sequence[str]:
    """`section.key was -> is` for every value that differs."""
    changes: list[str] = []
    # A damaged file may hold keys of several kinds.
    for key in sorted({*previous, *present}, key=str):
        was, now = previous.get(key), present.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            changes += changed_keys(was, now, f"{path}{key}.")
        elif was != now:
            changes.append(f"{path}{key} {was} -> {now}")
    return changes


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a configuration; empty where the file that held it was cut short."""
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _rewards(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rewards = config.get("rewards")
    return [each for each in rewards if isinstance(each, Mapping)] if isinstance(rewards, list) else []


def _of_reward(section: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in _FREE_OF_REWARDS}
