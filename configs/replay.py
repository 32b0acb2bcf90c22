"""The configuration of a replay: that of the run whose rollouts it learns from, and what is taken from there."""

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import Field

from configs.schema import ImageRunConfig, MismatchSection, RunConfig, TextRunConfig, UpdateSection
from configs.section import Digits, Name, Section

CORRECTION = MismatchSection(mode="truncate", level="token", cap=3.0)
"""Weights of rows that other weights sampled, where the configuration names none."""


class ReplaySection(Section):
    """What a replay takes from another run."""

    source: str = Field(min_length=1, description="run whose rollouts are used, under the same storage.root")
    policy: int = Field(0, ge=0, description="version of the source that is trained on; 0: the model as it was given")
    iterations: tuple[Digits, ...] = Field(min_length=1, description="of the source, one update each, in this order")
    advantages: Name = Field("stored", description="stored, recomputed, or the name of a rescoring of the source")
    max_staleness: int = Field(ge=0, description="versions between a row's policy and the one that is trained, at most")
    correction: MismatchSection = Field(
        CORRECTION, description="for rows that other weights sampled, where update.mismatch.mode is none"
    )


class ImageReplayConfig(ImageRunConfig):
    """A replay whose policy draws."""

    replay: ReplaySection


class TextReplayConfig(TextRunConfig):
    """A replay whose policy writes."""

    replay: ReplaySection


def corrected(update: UpdateSection, correction: MismatchSection) -> UpdateSection:
    """The update with the correction that rows of other weights need; what it says itself stays."""
    return update if update.mismatch.mode != "none" else update.model_copy(update={"mismatch": correction})


ReplayConfig = ImageReplayConfig | TextReplayConfig

_REPLAYS: Mapping[type[RunConfig], type[ImageReplayConfig] | type[TextReplayConfig]] = MappingProxyType(
    {ImageRunConfig: ImageReplayConfig, TextRunConfig: TextReplayConfig}
)


def as_replay(config: RunConfig, replay: ReplaySection) -> ReplayConfig:
    """The configuration of a run as that of a replay."""
    return _REPLAYS[type(config)].model_validate({**config.model_dump(), "replay": replay.model_dump()})
