"""One report of a command's result for the terminal, Prefect's UI and pages, and the pages themselves.

flows/terminal/output.py shows it in the terminal, `markdown_of` writes it for Prefect's UI and the model card, and the
macro `report` of templates/macros.html.jinja for pages. Everything in it is data: each of the three escapes it.

A page can be read without its script, which only filters, sorts and enlarges what is there.
"""

import base64
import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec

from grpo_core.errors import InputError
from grpo_core.rollouts.messages import shown_prompt
from tasks.metrics import HELDOUT
from tasks.reports.text import change, counted, excerpt, in_cell, markdown_table, metric_title, number, signed, visible
from tasks.storage.files import write_file_atomically

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.runtime import Context
    from PIL import Image

    from tasks.runs.run_view import Cost, RunSummary
    from tasks.runs.signs import Sign

Cells = dict[str, str]  # a row of a table: its cells by heading, in the order of the columns
Fact = tuple[str, str]  # the name of something, and its value


@dataclass(frozen=True)
class Table:
    """Rows under a title; without rows its note stands in their place, and without a note nothing at all."""

    title: str
    rows: Sequence[Cells]  # all with the same headings. The first column names the row
    # Headings of further columns of words, which may fold; cells of the others are numbers, in one piece.
    texts: Sequence[str] = ()
    meaning: str = ""  # what the columns mean, for readers of a page
    note: str = ""  # a sentence below, such as how much is left out

    def head(self, count: int, noun: str, page: str = "the page (--html FILE)") -> "Table":
        """Return the first rows, with a note of how many rows of this noun there are on the page."""
        if len(self.rows) <= count:
            return self
        return replace(self, rows=self.rows[:count], note=f"{count} of {len(self.rows)} {noun}; {page} shows all")


@dataclass(frozen=True)
class Notice:
    """Sentences that a reader should see first, under a title."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Report:
    """A command's result, shown in this order: notices, those with lines; tables; facts; notes."""

    title: str
    facts: Sequence[Fact] = ()
    tables: Sequence[Table] = ()
    notices: Sequence[Notice] = ()
    notes: Sequence[str] = ()


def signs_notice(signs: Sequence["Sign"]) -> Notice:
    """Return the signs of a run, a line each, for the top of a report."""
    return Notice("warning signs", [str(sign) for sign in signs])


def markdown_of(report: Report, level: int = 1) -> str:
    """Write a report as Markdown, its title as a heading of this level and those of its tables one below."""
    lines = [f"{'#' * level} {in_cell(report.title)}", ""] if report.title else []
    for notice in report.notices:
        if notice.lines:
            lines += [f"**{in_cell(notice.title)}**", "", *(f"- {in_cell(line)}" for line in notice.lines), ""]
    for table in report.tables:
        if table.title and (table.rows or table.note):
            lines += [f"{'#' * (level + 1)} {in_cell(table.title)}", ""]
        if table.rows:
            headings = [in_cell(heading) for heading in table.rows[0]]
            lines += [*markdown_table(headings, [[*map(in_cell, row.values())] for row in table.rows]), ""]
        lines += [in_cell(table.note), ""] if table.note else []
    if report.facts:
        lines += [*markdown_table(("", ""), [[*map(in_cell, fact)] for fact in report.facts]), ""]
    for note in report.notes:
        lines += [in_cell(note), ""]
    return "\n".join(lines)


def reward_facts(run: "RunSummary") -> list[Fact]:
    """List a run's reward, its held-out reward, and that of images that no policy made."""
    titles = {"blank": "held-out reward, blank images", "target": "held-out reward, the targets"}
    baselines = run.heldout_baselines
    reward, heldout = (metric_title(name, trained_on=run.trained_on)[0] for name in ("reward", HELDOUT))
    speed = run.samples_per_device_second
    return [
        (f"{reward}, first → last iteration", change(run.reward_first, run.reward_last)),
        (f"{heldout}, before → after", change(run.heldout_before, run.heldout_after)),
        *((title, number(baselines[name])) for name, title in titles.items() if name in baselines),
        *([("seconds to the best held-out reward", best)] if (best := _best(run)) else []),
        *([("samples per device-second", f"{speed:.3g}")] if speed else []),
    ]


def _best(run: "RunSummary") -> str | None:
    """Say how high the held-out reward was and what that took; None without training or evaluations."""
    if run.until_best is None or not run.until_best.seconds:
        return None
    return f"{cost_in_words(run.until_best)}: {number(run.heldout_best)}"


def cost_in_words(cost: "Cost | None") -> str:
    """Say how many samples and seconds some iterations took."""
    if cost is None:
        return "not reached"
    # A replay samples nothing.
    return f"{cost.seconds:.0f} s" + (f", {counted(cost.samples, 'sample')}" if cost.samples else "")


def seconds_facts(seconds: Mapping[str, float]) -> list[Fact]:
    """List the seconds of this start, `total`, and those of each stage, whichever start ran it."""
    titles = {"total": "this start"}
    return [(f"seconds, {titles.get(stage, stage)}", f"{spent:.1f}") for stage, spent in seconds.items()]


MAX_BYTES = 20 * 2**20  # bytes of the images and long texts of a page; it says so in place of everything further

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: object) -> str:
    """Fill a file of the folder `templates`; nothing in `values` is markup, and a missing value is an error."""
    # Most commands write no page, so neither this nor jinja2 is imported above.
    from markupsafe import Markup

    script = (_TEMPLATES / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = {"script": Markup(script), "script_sha256": digest, "room": [MAX_BYTES]}
    return _environment().get_template(template).render(**values, **own)


@functools.cache
def _environment() -> "Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
    )
    environment.filters |= {
        "excerpt": excerpt,
        "image": jinja2.pass_context(_image),
        "number": number,
        "shown_prompt": shown_prompt,
        "signed": signed,
        "whole": jinja2.pass_context(_whole),
    }
    return environment


def _image(context: "Context", image: "Image.Image", side: int | None = None, lossless: bool = True) -> str | None:
    """Encode an image, reduced to `side`, as a link while the page has room; not `lossless` if no pixel matters."""
    # The list of runs shows no image.
    from tasks.reports.images import LOSSLESS_SIDE, image_uri, shrunk

    # A page that is written again every few seconds shows most of its images again.
    links: dict[tuple[int | None, bool], str] = image.info.setdefault("links", {})
    if (side, lossless) not in links:
        small = image.convert("RGB") if side is None else shrunk(image.convert("RGB"), side)
        links[side, lossless] = image_uri(small, lossless_side=LOSSLESS_SIDE if lossless else 0)
    return _whole(context, links[side, lossless])


def _whole(context: "Context", content: str) -> str | None:
    """Return the content; None where it has no room on the page."""
    room, size = context["room"], len(content.encode())
    if size > room[0]:
        return None
    room[0] -= size
    return content


def write_page(path: Path, page: str) -> None:
    """Write a page to a file, complete or not at all."""
    path = path.expanduser().absolute()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".grpo-") as scratch:
        write_file_atomically(fsspec.filesystem("file"), str(path), page.encode(), scratch=Path(scratch))


def require_page_path(html: Path) -> None:
    """Raise InputError unless a page can be written to this file."""
    folder = html.expanduser().absolute().parent
    if html.suffix.lower() not in (".html", ".htm"):
        raise InputError("--html", str(html), "Name a file that ends in .html.")
    if html.expanduser().is_dir():
        raise InputError("--html", str(html), "This is a folder. Name a file in it.")
    if not folder.is_dir():
        raise InputError("--html", str(html), f"There is no folder {folder}. Create it, or name another file.")
    if not os.access(folder, os.W_OK):
        raise InputError("--html", str(html), f"{folder} cannot be written. Name a file somewhere else.")
