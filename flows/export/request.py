"""The options of `grpo export`; nothing that takes long to import is imported here."""

from typing import Annotated

from pydantic import Field
from typer import Argument, Option

from configs.validation import Section

VERSION_PATTERN = r"^(best|[0-9]{1,9})$"
Version = Annotated[str | None, Option(metavar="N|best")]


class ExportRequest(Section):
    """Writes a policy version as a folder that diffusers, transformers and peft load."""

    run: Annotated[str, Argument(metavar="RUN")] = Field(
        min_length=1, description="a run under the storage root, or the path of its folder"
    )
    folder: Annotated[str, Argument(metavar="DIR")] = Field(min_length=1, description="a new or an empty folder")
    policy: Version = Field(
        None,
        pattern=VERSION_PATTERN,
        description="policy version, or best: the highest held-out reward; by default the last valid one",
    )
    merge: Annotated[bool, Option("--merge")] = Field(
        False, description="write the whole model with the adapter merged into its weights"
    )
    push_to_hub: Annotated[str | None, Option(metavar="REPO")] = Field(
        None, min_length=1, description="also upload the folder to this repository of the Hugging Face hub"
    )
    root: Annotated[str, Option(metavar="DIR")] = Field(
        "runs", min_length=1, description="where runs are stored: a folder or any fsspec URL"
    )
