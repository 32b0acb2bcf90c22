"""`make figures`: what README.md and docs/ show of runs, made again: outputs, tables and pictures.

The trainings of docs/performance.md run with each seed, here and in TRL, that of a released model once (it needs the
hub or `make smollm2`), and with two engines (`make test-engines` installs the server), and their tables replace what
stands between `<!-- results: NAME -->` and `<!-- end -->`. README.md and docs/tutorial.md run from their first block to
their last in a folder of their own, as a person would in a new checkout. There, what stands between `<!-- output: last
9 -->` and `<!-- end -->` becomes the last (or first) nine lines that the block above prints, without those that have a
word (`last 9 without seconds`, which leaves out the times of progress lines too); `<!-- picture: NAME from PATH at
WIDTHxHEIGHT -->` makes docs/NAME from an image or a page of that folder; and what stands between `<!-- made: begin -->`
and `<!-- made: end -->` says when, where and from which commit.
"""

import importlib
import re
import resource
import shutil
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import polars as pl

from tasks.process import CHECKOUT
from tasks.reports.text import markdown_table
from tests.bench import make_parts
from tests.bench.page import place_of, this_machine, write_results
from tests.chromium import PROGRAM, opened_tab
from tests.pages import blocks, prepare, run

DOCS = CHECKOUT / "docs"
PAGES = {
    "readme": CHECKOUT / "README.md",
    "tutorial": DOCS / "tutorial.md",
    "coming_from_trl": DOCS / "coming_from_trl.md",
}
SEEDS = (0, 1, 2)
TRAININGS = {
    "tiny": ("r2",),
    "tiny_sd3": ("r2",),
    "tiny_sd3_nft": ("r2",),
    "tiny_both": ("r2", "brightness"),
    "tiny_edit": ("r2",),
}
"""Configuration -> the held-out rewards of its table."""
MOST_WORSE = 2
"""Prompts of a seed that a table names as worse after training than before."""
CONTACT_SHEETS = {"tiny_sd3": "contact_sheet_sd3.png"}
"""Configuration -> the picture in docs/ of its held-out samples before and after training with the first seed."""
MADE_BY = {
    "tiny_text": "tests.bench.curves",
    "smollm2_sums": "tests.bench.sums",
    "grounding": "tests.bench.curves",
    "grounding_two": "tests.bench.curves",
    "engines": "tests.bench.engines",
    "attacks": "tests.attacks.attacks",
}
"""Table -> the module that makes it: trainings here and in TRL, with their curves, or with two engines; and what
adversarial images and texts reach."""
ONLY_NAMED = ("engines",)
"""What needs the environment of `make test-engines`."""
DRAWN = ("sick_runs", "pictures")
"""Modules that make no table: the plots of docs/is_it_learning.md, and what runs show in a browser."""
PARTS = (*PAGES, *TRAININGS, *MADE_BY, *DRAWN)
_OUTPUT = re.compile(r"\n*(?P<mark><!-- output: (first|last) (\d+)(?: without (\w+))? -->)\n(?:.*\n)*?<!-- end -->\n")
_PICTURE = re.compile(r"<!-- picture: (\S+) from (\S+?)(?: at (\d+)x(\d+))? -->")
_TIMES = re.compile(r", [\d.]+ s(, about [\d:]+ left)?$")
_PROGRESS = re.compile(r"\d+/\d+ iterations in [\d.]+ s$")
"""A line of a busy machine."""
_MADE = re.compile(r"<!-- made: begin -->\n(?:.*\n)*?<!-- made: end -->\n")


def make(name: str, commit: str | None) -> None:
    """Make a part from this commit."""
    if name in DRAWN:
        importlib.import_module(f"tests.bench.{name}").main()
        return
    if name in PAGES:
        make_page(PAGES[name], commit)
        return
    rows = list(heldout_table(name)) if name in TRAININGS else importlib.import_module(MADE_BY[name]).table(name)
    # The commit has the lock, and so the versions of the libraries.
    machine = this_machine()
    where = f"{machine.processor}, {machine.cores} cores, {machine.gpu or 'no GPU'}"
    write_results(name, [*rows, "", f"{date.today()}, commit {commit}; {where}."])


def heldout_table(name: str) -> Iterator[str]:
    """Train a shipped configuration with each seed.

    Yields:
        Lines of a table of held-out rewards by policy version, and which prompts are worse after training.
    """
    from flows import open_run, train

    rows, worse = [], []
    values = [f"rewards/{reward}" for reward in TRAININGS[name]]
    with tempfile.TemporaryDirectory(prefix="grpo-figures-") as root:
        for seed in SEEDS:
            overrides = {"run.seed": seed, "run.name": f"seed{seed}", "storage.root": root}
            train(f"configs/{name}.yaml", overrides=overrides)
            if name in CONTACT_SHEETS and seed == SEEDS[0]:
                shutil.copy(f"{root}/seed{seed}/contact_sheet.png", DOCS / CONTACT_SHEETS[name])
            samples = open_run(f"{root}/seed{seed}").heldout()
            means = samples.group_by("policy_version").agg(pl.col(values).mean()).sort("policy_version")
            cells = [" / ".join(f"{row[value]:.3f}" for value in values) for row in means.iter_rows(named=True)]
            rows.append((str(seed), *cells[:-1], f"**{cells[-1]}**"))
            versions = means["policy_version"].to_list()
            if found := _worse(samples, values[0]):
                more = f" and {len(found) - MOST_WORSE} more" * (len(found) > MOST_WORSE)
                worse.append(f"with seed {seed} {', '.join(found[:MOST_WORSE])}{more}")
    yield from markdown_table(("training seed", "before", *(f"iteration {each}" for each in versions[1:])), rows)
    said = f"Worse after training than before: {'; '.join(worse) or 'no prompt with any seed'}."
    yield from ("", textwrap.fill(said, 150, break_on_hyphens=False))


def _worse(samples: pl.DataFrame, value: str) -> list[str]:
    """Return the prompts whose mean has fallen, with both means, the largest fall first."""
    ends = (samples["policy_version"].min(), samples["policy_version"].max())
    before, after = (
        dict(samples.filter(policy_version=each).group_by("prompt").agg(pl.col(value).mean()).rows()) for each in ends
    )
    fallen = sorted((after[prompt] - before[prompt], prompt) for prompt in before if after[prompt] < before[prompt])
    return [f"{prompt} ({before[prompt]:.3f} to {after[prompt]:.3f})" for _, prompt in fallen]


def make_page(page: Path, commit: str | None) -> None:
    """Run a page, and write what it shows."""
    text = page.read_text(encoding="utf-8")
    begun, used = time.perf_counter(), _cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="grpo-figures-") as made:
        folder = Path(made)
        prepare(folder)
        shown, position = [], 0
        for block in blocks(page):
            if not block.runs_here:
                continue
            print(block.place, flush=True)
            printed = run(block, folder)
            if found := _OUTPUT.match(text, block.end):
                lines = printed.replace(f"{folder}/", "").replace(f"{CHECKOUT}/", "").strip().splitlines()
                lines = [line for line in lines if not _PROGRESS.match(line)]
                lines = lines[: int(found[3])] if found[2] == "first" else lines[-int(found[3]) :]
                lines = [line.rstrip() for line in lines if not found[4] or found[4] not in line]
                if found[4] == "seconds":
                    lines = [_TIMES.sub("", line) for line in lines]
                inside = "\n".join(["```text", *lines, "```", *_digest_note(lines)])
                shown += [text[position : found.start()], f"\n{found['mark']}\n{inside}\n<!-- end -->\n"]
                position = found.end()
        for name, path, width, height in _PICTURE.findall(text + _shown_elsewhere(page)):
            _picture(folder / path, DOCS / name, int(width or 0), int(height or 0))
    wall, cpu = time.perf_counter() - begun, _cpu_seconds() - used
    said = (
        f"Outputs and pictures are those of one run of this page by `make figures`, {date.today()}, commit {commit}: "
        f"{wall / 60:.0f} minutes, {cpu / 60:.0f} of them CPU time; {place_of(this_machine())}"
    )
    whole, said = "".join([*shown, text[position:]]), textwrap.fill(said, 150, break_on_hyphens=False)
    page.write_text(_MADE.sub(f"<!-- made: begin -->\n{said}\n<!-- made: end -->\n", whole), encoding="utf-8")


def _shown_elsewhere(page: Path) -> str:
    """Return the pages that show pictures of what the README's commands make, where it is the README that runs."""
    others = (each for each in sorted(DOCS.glob("*.md")) if each not in PAGES.values())
    return "".join(each.read_text(encoding="utf-8") for each in others) if page == PAGES["readme"] else ""


def _digest_note(lines: Sequence[str]) -> list[str]:
    """Say which processor gave the digest that these lines show; nothing where they show none."""
    if not any(line.lstrip().startswith("policy digest") for line in lines):
        return []
    said = f"The digest is that of {this_machine().processor}: another processor rounds sums in another order."
    return ["", textwrap.fill(said, 150, break_on_hyphens=False)]


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _picture(source: Path, to: Path, width: int, height: int) -> None:
    """Copy an image, or take a picture of an HTML page with Chromium (apt-get install chromium)."""
    if source.suffix != ".html":
        shutil.copy(source, to)
        return
    assert PROGRAM, f"{to.name} shows a page, and there is no Chromium: apt-get install chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, opened_tab(Path(profile)) as tab:
        tab.open(source.as_uri(), width, height)
        tab.screenshot(to)


if __name__ == "__main__":
    make_parts("tests.bench.figures", PARTS, make, only_named=ONLY_NAMED)
