"""Requests of the commands `evaluate`, `rescore` and `replay`: one model is the options in the terminal and the form.

Nothing that takes long to import is imported here: options are shown and checked at once.
"""

from typing import Annotated

from pydantic import Field
from typer import Argument, Option

from configs.validation import NAME_PATTERN, Name, Section

Overrides = Annotated[tuple[str, ...], Option("--set", metavar="KEY=VALUE")]
Root = Annotated[str, Option(metavar="DIR")]
Run = Annotated[str, Argument(metavar="RUN")]

_ROOT = "where runs are stored: a folder or any fsspec URL"
_RUN = "a run under the storage root, or the path of its folder"

MAX_STALENESS = 4
"""Versions; as many as systems allow that sample while they train (Fu et al., 2025, AReaL, arXiv:2505.24298)."""


class EvaluateRequest(Section):
    """Evaluates a policy version on held-out prompts with fixed seeds; what is stored is not computed again."""

    run: Run = Field(min_length=1, description=_RUN)
    policy: Annotated[int | None, Option(metavar="N")] = Field(
        None, ge=0, description="policy version; 0 is the initial model; by default the last valid one"
    )
    prompts: Annotated[str | None, Option(metavar="FILE")] = Field(
        None, min_length=1, description="prompt file to use instead of the run's held-out prompts"
    )
    overrides: Overrides = Field((), description="change the run's configuration, as section.key=value")
    root: Root = Field("runs", min_length=1, description=_ROOT)


class RescoreRequest(Section):
    """Scores stored rollouts with other rewards or weights, and reports what changed."""

    sources: Annotated[tuple[str, ...], Argument(metavar="RUN...")] = Field(
        min_length=1, description="runs under the storage root, or paths of their folders"
    )
    rewards: Annotated[str, Option(metavar="FILE")] = Field(
        min_length=1, description="YAML file with `rewards:`, and optionally `advantages:`"
    )
    name: Annotated[Name, Option(metavar="NAME")] = Field(
        description="name of the rescoring, a folder below rescored/ in each run"
    )
    iterations: Annotated[str | None, Option(metavar="A-B")] = Field(
        None, description="iterations to score; by default all"
    )
    html: Annotated[str | None, Option(metavar="FILE")] = Field(None, description="also write the report to this file")
    root: Root = Field("runs", min_length=1, description=_ROOT)


class ReplayRequest(Section):
    """Trains a policy from another run's stored rollouts, off-policy corrected; no training rollouts are sampled."""

    source: Run = Field(min_length=1, description=_RUN)
    advantages: Annotated[str | None, Option(metavar="NAME")] = Field(
        None, description="stored, recomputed, or a name below rescored/; by default stored unless --set changes them"
    )
    iterations: Annotated[str | None, Option(metavar="A-B")] = Field(
        None, description="iterations of the source, one update each; by default all"
    )
    policy: Annotated[int, Option(metavar="N")] = Field(
        0, ge=0, description="policy version of the source to start from; 0 is the initial model"
    )
    max_staleness: Annotated[int, Option(metavar="K")] = Field(
        MAX_STALENESS, ge=0, description="maximum versions between a row's policy and the policy that is trained"
    )
    name: Annotated[str | None, Option("--run", metavar="NAME")] = Field(
        None, pattern=NAME_PATTERN, description="name of the replay; by default RUN-replay"
    )
    overrides: Overrides = Field((), description="change the source's configuration, as section.key=value")
    root: Root = Field("runs", min_length=1, description=_ROOT)

    @property
    def run_name(self) -> str:
        """Name of the replay."""
        return self.name or f"{self.source.rstrip('/').rpartition('/')[2]}-replay"


class DeployRequest(Section):
    """Registers a configuration with Prefect's server, to be started by a schedule, in the UI or by hand."""

    cron: Annotated[str | None, Option(metavar="EXPRESSION")] = Field(
        None, description='when to train, such as "0 2 * * *"; "" ends the schedule'
    )
    timezone: Annotated[str | None, Option(metavar="TZ")] = Field(
        None, description="time zone of --cron; by default UTC"
    )
    pool: str = Field(
        "training", description="work pool whose workers run it; created for `grpo worker` if it is missing"
    )
    image: str | None = Field(
        None, min_length=1, description="container image with this checkout, for pools such as kubernetes or docker"
    )
    name: str | None = Field(None, description="name of the deployments; by default the run's")
    evaluate: Annotated[bool, Option("--evaluate")] = Field(False, description="also register evaluations of the run")
    rescore: Annotated[tuple[str, ...], Option("--rescore", metavar="FILE")] = Field(
        (), description="also register a rescoring with these rewards"
    )
