"""The options of `grpo sample`; nothing that takes long to import is imported here."""

from typing import Annotated

from pydantic import Field
from typer import Argument, Option

from configs.validation import Section
from flows.export.request import VERSION_PATTERN, Version


class SampleRequest(Section):
    """Draws or answers prompts with a run's policy, an exported folder or any model."""

    source: Annotated[str, Argument(metavar="RUN|MODEL")] = Field(
        min_length=1, description="a run, a folder that `grpo export` wrote, or a model's folder"
    )
    prompts: Annotated[tuple[str, ...], Argument(metavar="PROMPT...")] = Field(
        min_length=1, description="texts, each in quotes"
    )
    policy: Version = Field(
        None,
        pattern=VERSION_PATTERN,
        description="policy version of a run, or best: the highest held-out reward; by default the last valid one",
    )
    seed: int = Field(0, ge=0, description="the same seed gives the same samples")
    samples: Annotated[int, Option("--n", metavar="K")] = Field(1, ge=1, description="samples per prompt")
    out: Annotated[str | None, Option(metavar="DIR")] = Field(
        None, min_length=1, description="folder for images; by default samples"
    )
    overrides: Annotated[tuple[str, ...], Option("--set", metavar="KEY=VALUE")] = Field(
        (), description="change rollout or placement, such as rollout.temperature=0.7"
    )
    root: Annotated[str, Option(metavar="DIR")] = Field(
        "runs", min_length=1, description="where runs are stored: a folder or any fsspec URL"
    )
