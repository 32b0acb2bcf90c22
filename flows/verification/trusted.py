"""What a stored stage would run, connect to or read: only what the person knows, or agrees to."""

from collections.abc import Iterable, Iterator, Mapping

from pydantic import BaseModel

from flows.verification.stored_stages import StoredStage
from tasks.models.resident import ModelSpec
from tasks.reports.text import printable
from tasks.runs.trust import Use, known_digests, remember, uses_of


def unknown_uses(uses: Iterable[Use], *, trust: bool) -> list[Use]:
    """Return those that are not on this machine, or that the person neither knows nor now trusts."""
    found = list(uses)
    if trust:
        remember(found)
    known = known_digests()
    return [use for use in found if use.is_missing or use.digest not in known]


def refusal(use: Use) -> str:
    """Say why a stage that needs this is not tried."""
    named = f"config.yaml, {use.place} names {printable(use.value)}"
    if use.is_missing:
        return f"{named}, which is not on this machine"
    return f"{named}, and you have not trained with exactly that here; read what it does, then add --trust-code"


def uses_of_stage(stage: StoredStage) -> Iterator[Use]:
    """Yield what the settings among a stage's arguments name, those of a rescoring's rewards too."""
    for name, value in stage.arguments.items():
        match value:
            case ModelSpec(section=section):
                yield from uses_of(section, "policy")
            case BaseModel() if name == "section":
                yield from uses_of(value, f"rewards.{getattr(value, 'label', '')}")
            case BaseModel() if name in ("rollout", "updates"):
                yield from uses_of(value, name)
            case Mapping():
                for stream, each in value.items():
                    if isinstance(each, BaseModel):
                        yield from uses_of(each, f"update.{stream}")
