"""What a stored run's configuration would use: only what this person knows, or agrees to with `--trust-code`."""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from configs.rollouts import RolloutSection
from configs.schema import RunConfig
from configs.validation import Section
from flows.requests import EvaluateRequest, ExportRequest, ReplayRequest, VerifyRequest, refuse_overrides
from grpo_core.errors import InputError, raise_all
from grpo_core.uses import Uses
from tasks.reports.text import printable
from tasks.runs.lookup import CONFIG_FILE, find_run
from tasks.runs.stored import stored_config
from tasks.runs.trust import Use, known_digests, known_target_folders, remember, uses_of
from tasks.storage.artifacts.store import ArtifactStore

EVALUATED = ("policy", "rollout", "evaluate", "rewards", "guardrails", "placement", "storage")
"""The sections that an evaluation uses; a replay uses all."""
OF_MODEL = ("policy",)
"""Those that samples and an export use."""
_COMPARED = ("rewards.", "guardrails.")
"""Scores of replaced rewards are compared with the stored ones, for which they are loaded."""


def trusted_config(
    store: ArtifactStore,
    overrides: Sequence[str] = (),
    *,
    trust: bool,
    sections: Collection[str] | None = None,
    hint_against: Callable[[str], str | None] = lambda path: None,
) -> RunConfig:
    """Return a run's configuration with changes, if the person trusts what the run itself names.

    Args:
        overrides: as for stored_config; what they name is the person's own.
        trust: whether the person agrees to what is not known, which is then remembered.
        sections: those that are used; None: all.
        hint_against: what the command says against changing a setting; None where it can be changed.

    Raises:
        InputError: with an entry for each value that is not known, or whose file or folder is not on this machine, or
            for each change without effect; or as stored_config.
    """
    own = stored_config(store)
    changed = stored_config(store, overrides) if overrides else own
    raise_all(changes_without_effect(own.rollout, changed.rollout))
    used = {*uses_of(changed, within=sections)}
    raise_all(
        _moved(store, use, settable=hint_against(use.place) is None)
        for use in uses_of(own, within=sections)
        if use in used and use.is_missing
    )
    uses = [each for each in uses_of(own, within=sections) if each in used or each.place.startswith(_COMPARED)]
    require_trust(uses, f"{store.run}/{CONFIG_FILE}", trust=trust)
    return changed


def changes_without_effect(own: RolloutSection, changed: RolloutSection) -> Iterator[InputError]:
    """Yield changes of how training rollouts are sampled: who uses a stored run samples none."""
    for name in sorted(own.training_settings):
        if (value := getattr(changed, name)) != getattr(own, name):
            hint = "Only training rollouts depend on it, and this command samples none; leave it out."
            yield InputError(f"rollout.{name}", value.model_dump() if isinstance(value, Section) else value, hint)


def requested_config(
    request: EvaluateRequest | ExportRequest | ReplayRequest | VerifyRequest,
    changes: Sequence[str],
    sections: Collection[str] | None = None,
) -> tuple[ArtifactStore, RunConfig]:
    """Find the run of a request, and return its configuration with changes; `sections` are those used, None is all.

    Raises:
        InputError: there is no such run, a setting that the command cannot change, or as trusted_config.
    """
    store = find_run(request.named.run, request.root)
    refuse_overrides(request.overrides, request.hint_against)
    trust, hint_against = request.trust_code, request.hint_against
    return store, trusted_config(store, changes, trust=trust, sections=sections, hint_against=hint_against)


def trusted_folders(config: RunConfig, *, trust: bool) -> tuple[str, ...]:
    """Return the folders of target images of prompts that the person knows, or, with `trust`, of all from now on."""
    if trust:
        remember(uses_of(config, within=("data", "evaluate")))
    return known_target_folders(config)


def require_trust(uses: Iterable[Use], named_by: str, *, trust: bool) -> None:
    """Refuse what is not known, with the run's file that names it, unless the person trusts it."""
    known = known_digests()
    new = [use for use in uses if not use.is_missing and use.digest not in known]
    if trust:
        remember(new)
    else:
        raise_all(_refused(use, named_by) for use in new)


def _moved(store: ArtifactStore, use: Use, *, settable: bool) -> InputError:
    """Return what to do about a file or folder of a run that is not on this machine, or elsewhere."""
    named = use.value.rpartition(":")[0] if use.use is Uses.CODE else use.value
    place = named if Path(named).is_absolute() else Path(store.root).parent / named
    hint = f"The run was made with it, and it is not here. Start grpo where the run was started, or put it at {place}"
    given = f"PATH:{use.value.rpartition(':')[2]}" if use.use is Uses.CODE else "PATH"
    hint += f", or give --set {use.place}={given}." if settable else "."
    return InputError(f"{store.run}/{CONFIG_FILE}, {use.place}", use.value, hint)


def _refused(use: Use, named_by: str) -> InputError:
    named: dict[str, Any] = json.loads(use.details)
    others = {key: each for key, each in named.items() if not use.place.endswith(f".{key}")}
    match use.use:
        case Uses.VARIABLE:
            # The token of a service without an address is never sent.
            done = " and ".join(map(str, others.values())) or "the service"
        case Uses.CODE:
            done = str(use.file or use.value) + "".join(
                f" with {key} {json.dumps(each)}" for key, each in others.items()
            )
        case _:
            done = use.value
    imported = " It, or a file that it imports, may have changed since." if use.file is not None else ""
    is_here = use.use is not Uses.PLACE or "://" in use.value or os.path.exists(os.path.expanduser(use.value))
    absent = "" if is_here else " It is not on this machine: if it is a folder, start grpo where the run was started."
    hint = (
        f"{use.use.value} {printable(done)}, and you have not trained with exactly that on this machine.{absent}"
        f"{imported} If the run is somebody else's, read what it does first; --trust-code (in Python "
        "trust_code=True) agrees to it and remembers it."
    )
    return InputError(f"{named_by}, {use.place}", use.value, hint)
