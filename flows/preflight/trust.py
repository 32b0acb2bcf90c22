"""What a stored run's configuration would use: only what this person knows, or agrees to with `--trust-code`."""

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from configs.schema import RunConfig
from flows.requests import EvaluateRequest, ReplayRequest, refuse_overrides
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
    store: ArtifactStore, overrides: Sequence[str] = (), *, trust: bool, sections: Collection[str] | None = None
) -> RunConfig:
    """Return a run's configuration with changes, if the person trusts what the run itself names.

    Args:
        overrides: as for stored_config; what they name is the person's own.
        trust: whether the person agrees to what is not known, which is then remembered.
        sections: those that are used; None: all.

    Raises:
        InputError: with an entry for each value that is not known; or as stored_config.
    """
    own = stored_config(store)
    changed = stored_config(store, overrides) if overrides else own
    used = {*uses_of(changed, within=sections)}
    uses = [each for each in uses_of(own, within=sections) if each in used or each.place.startswith(_COMPARED)]
    require_trust(uses, f"{store.run}/{CONFIG_FILE}", trust=trust)
    return changed


def requested_config(
    request: EvaluateRequest | ReplayRequest, changes: Sequence[str], sections: Collection[str] | None = None
) -> tuple[ArtifactStore, RunConfig]:
    """Find the run of a request, and return its configuration with changes; `sections` are those used, None is all.

    Raises:
        InputError: there is no such run, a setting that the command cannot change, or as trusted_config.
    """
    store = find_run(request.named.run, request.root)
    refuse_overrides(request.overrides, request.hint_against)
    return store, trusted_config(store, changes, trust=request.trust_code, sections=sections)


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
    hint = (
        f"{use.use.value} {printable(done)}, and you have not trained with exactly that on this machine.{imported} If "
        "the run is somebody else's, read what it does first; --trust-code (in Python trust_code=True) agrees to it "
        "and remembers it."
    )
    return InputError(f"{named_by}, {use.place}", use.value, hint)
