"""The file next to a shipped model that says how it was made."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RECIPE_FILE = "recipe.json"


def write_recipe(
    folder: Path, recipe: "DataclassInstance", measured: Mapping[str, object], *, libraries: Sequence[str]
) -> None:
    """Write recipe.json into a saved model's folder: the recipe, library versions, and what was measured.

    Args:
        folder: of the saved model.
        recipe: of the model.
        measured: plain JSON values by name, such as the fields of the training metrics and reports.
        libraries: those whose versions affect the result.
    """
    content = {
        "recipe": asdict(recipe),
        "versions": {name: version(name) for name in libraries},
        "measured": dict(measured),
    }
    (folder / RECIPE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
