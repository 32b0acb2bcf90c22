"""What becomes of every class of pipeline in diffusers: tried, expected to fit, or refused and why.

`python -m tests.grpo_core.policies.diffusers.pipeline_classes` writes the table and its section of docs/denoising.md.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import diffusers

from grpo_core.policies.diffusers.pipeline_class import TRIED, find_pipeline_class

TABLE = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[4] / "docs" / "denoising.md"
CLASSES = tuple(sorted({name for name in dir(diffusers) if name.endswith("Pipeline")}))
BEGIN, END = "<!-- classes: begin -->", "<!-- classes: end -->"

_IS_TRIED, _EXPECTED = "tried", "expected"


def outcome(name: str) -> str | None:
    """`tried`, `expected`, or the reason why it is refused; None for what is no pipeline of images, such as ONNX's."""
    described = find_pipeline_class(name)
    if described is None:
        return None
    if name in TRIED:
        return _IS_TRIED
    return described.problem or _EXPECTED


def section(table: Mapping[str, str]) -> str:
    """The lists of docs/denoising.md; why the others are refused is said by doctor."""
    return f"""{BEGIN}
Tried with random weights ({_count(table, _IS_TRIED)}):

{_listed(table, _IS_TRIED)}

Expected to fit, by their signatures ({_count(table, _EXPECTED)}):

{_listed(table, _EXPECTED)}
{END}"""


def _count(table: Mapping[str, str], kind: str) -> int:
    return sum(found == kind for found in table.values())


def _listed(table: Mapping[str, str], kind: str) -> str:
    return ", ".join(name for name, found in table.items() if found == kind)


def main() -> None:
    """Write the table and the page."""
    outcomes = {name: outcome(name) for name in CLASSES}
    table = {name: found for name, found in outcomes.items() if found is not None}
    TABLE.write_text(json.dumps(table, indent=0) + "\n")
    text = PAGE.read_text()
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    PAGE.write_text(text[:begin] + section(table) + text[end:])


if __name__ == "__main__":
    main()
