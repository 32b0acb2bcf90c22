"""What `grpo evaluate EXPORT --card` repeats: the card of an exported folder as a configuration, once it is trusted."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.loader import apply_overrides
from configs.schema import RunConfig
from configs.validation import validated
from flows.export.folder import policy_values
from flows.preflight.trust import EVALUATED, require_trust
from flows.requests import RepeatRequest, refuse_overrides
from grpo_core.errors import InputError, raise_all
from tasks.reports.text import counted
from tasks.runs.trust import uses_of
from tasks.verification.evaluation_card import EVALUATION_FILE, IMAGES_FOLDER, EvaluationCard, read_card


def read_request(request: RepeatRequest) -> EvaluationCard:
    """Read the card of the requested folder; InputError for settings that cannot be changed, and for what it lacks."""
    refuse_overrides(request.overrides, request.hint_against)
    folder = Path(request.folder).expanduser()
    card = read_card(folder)
    place = str(folder / EVALUATION_FILE)
    if card.without_prompts:
        raise InputError(place, "no prompts", "It was exported with --without-prompts, so nobody can repeat it.")
    if card.missing:
        hint = f"Not found at the export: put them there, named by their sha256, and clear missing in {place}."
        raise InputError(str(folder / IMAGES_FOLDER), counted(len(card.missing), "image"), hint)
    if len(card.prompts) * card.settings.samples_per_prompt != len(card.samples) or not card.prompts:
        hint = f"{counted(len(card.prompts), 'prompt')} of settings.samples_per_prompt have others; no export wrote it."
        raise InputError(f"{place}, samples", counted(len(card.samples), "sample"), hint)
    if card.settings.policy.get("kind") is None:
        raise InputError(f"{place}, settings.policy.kind", None, "An export states it; export the policy again.")
    if card.settings.advantages.get("kl_coef"):
        hint = "Its reward counts the distance to the policy that training started from, which the folder has not."
        raise InputError(f"{place}, settings.advantages.kl_coef", card.settings.advantages["kl_coef"], hint)
    return card


def card_config(card: EvaluationCard, request: RepeatRequest, root: Path) -> RunConfig:
    """Return the configuration of a card with the requested changes, if the person trusts what the card itself names.

    Args:
        root: storage root of the repetition.

    Raises:
        InputError: an entry for each value that is not known, or what is wrong with the settings of the card.
    """
    folder = Path(request.folder).expanduser().absolute()
    own = _config(card, folder, root, ())
    changed = _config(card, folder, root, request.overrides)
    kept = {*uses_of(changed, within=EVALUATED)}
    # The folder itself is what the person named.
    ours = {str(folder), str(folder / EVALUATION_FILE), str(folder / IMAGES_FOLDER)}
    uses = [use for use in uses_of(own, within=EVALUATED) if use in kept and use.value not in ours]
    require_trust(uses, str(folder / EVALUATION_FILE), trust=request.trust_code)
    return changed


def _config(card: EvaluationCard, folder: Path, root: Path, overrides: Sequence[str]) -> RunConfig:
    settings = card.settings
    prompts, targets = str(folder / EVALUATION_FILE), str(folder / IMAGES_FOLDER)
    values: dict[str, Any] = {
        "run": {"name": "card", "iterations": 1},
        "policy": policy_values(folder, settings.policy, merged=card.merged),
        "data": {},
        "rollout": dict(settings.rollout),
        "rewards": list(settings.rewards),
        "guardrails": dict(settings.guardrails),
        "advantages": dict(settings.advantages),
        "evaluate": {
            "seed": settings.seed,
            "samples_per_prompt": settings.samples_per_prompt,
            "datasets": [{"name": each.name, "prompts": prompts, "targets": targets} for each in card.datasets],
        },
        # No more than this machine has, whoever wrote the card.
        "placement": {"torch_threads": min(settings.torch_threads, os.cpu_count() or 1)},
        "storage": {"root": str(root)},
    }
    raise_all(apply_overrides(values, overrides))
    return validated(RunConfig, values)
