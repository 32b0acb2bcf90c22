"""Which code a run was made with, stage by stage, and how it goes on when that code has changed."""

from collections.abc import Mapping, Sequence
from typing import Any

from configs.schema import RunConfig
from tasks.execution.caching import accept_code, accepted_fingerprint
from tasks.execution.fingerprint import code_fingerprint
from tasks.execution.stages import STAGES, stage_named
from tasks.models.resident import ModelSpec

CODE, ACCEPTED = "code", "accepted_code"


def stage_code(config: RunConfig, model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Where the code of each stage of a run begins, by the stage's name; each reward is a stage of its own.

    Args:
        config: the run's configuration.
        model: the model that is trained.
    """
    code = {}
    for name in STAGES:
        if name == "score reward":
            for section in config.rewards:
                code[f"score {section.label}"] = stage_named(name).roots({"section": section})
        else:
            code[name] = stage_named(name).roots({"model": model})
    return code


def settle_code(code: Mapping[str, tuple[str, ...]], described: Mapping[str, Any], *, accept: bool) -> dict[str, str]:
    """Let the keys of this run name the code that its results were made with, where a change was accepted.

    Args:
        code: from `stage_code`.
        described: the content of run.json; empty for a new run.
        accept: whether code that differs from the recorded one is accepted from here on.

    Returns:
        What run.json keeps as accepted: by the fingerprint of changed code, the one that stands in the keys.
    """
    accepted: dict[str, str] = dict(described.get(ACCEPTED, {}))
    recorded: Mapping[str, str] = described.get(CODE, {})
    if accept:
        for name, roots in code.items():
            current, before = code_fingerprint(roots), recorded.get(name)
            if before is not None and accepted.get(current, current) != before:
                accepted[current] = before
    accept_code(accepted)
    return accepted


def recorded_code(code: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """The fingerprint of each stage's code as it stands in the keys."""
    return {name: accepted_fingerprint(roots) for name, roots in code.items()}


def changed_stages(recorded: Mapping[str, str], current: Mapping[str, str]) -> Sequence[str]:
    """Names of the stages whose code differs from the recorded one."""
    return sorted(name for name in current if name in recorded and recorded[name] != current[name])
