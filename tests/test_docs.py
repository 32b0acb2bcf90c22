"""Defaults that docs/denoising.md states, what docs/is_it_learning.md covers, and the tables of the benchmarks."""

import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

import configs
from configs.training import DenoisingUpdateSection, ParitySection, UpdateSection
from grpo_core.rollouts.streams import STREAMS
from tasks.reports.text import METRICS
from tasks.runs.signs import SIGNS
from tests.bench import page
from tests.bench.page import Machine, Measured, Row

DOCS = Path(configs.__file__).parent.parent / "docs"
PAGE = (DOCS / "denoising.md").read_text(encoding="utf-8")


def test_the_stated_defaults_are_those_of_the_sections() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    stated = {row[0].replace("`", ""): row[1:] for row in rows if len(row) == 3}
    sections = (UpdateSection(), DenoisingUpdateSection())
    assert [float(each) for each in stated["learning_rate"]] == [section.learning_rate for section in sections]
    assert [float(each) for each in stated["clip_range"]] == [section.clip_range for section in sections]
    assert stated["kl_estimator"] == [section.kl_estimator for section in sections]
    for name, in_fp32 in (("parity.max_difference, mean_difference in fp32", True), ("the same in 16 bits", False)):
        written = dict(zip(STREAMS, stated[name], strict=True))
        for stream, text in written.items():
            if stream == "tokens" and not in_fp32:
                assert "is_it_learning.md#parity" in text, "it depends on the model and the text"
                continue
            tolerance = ParitySection().tolerance(stream, in_fp32=in_fp32)
            assert [float(each) for each in text.split(",")] == [tolerance.max_difference, tolerance.mean_difference]


MACHINE = Machine(
    "a processor", 2, 8.0, None, "3.11.7", dict.fromkeys(("torch", "transformers", "prefect", "trl"), "1")
)
RATIO = Row(what="step", unit="s", ours=(3.0, 1.0, 2.0), peer="TRL", theirs=(2.0, 4.0, 8.0), at_most=0.25)
MEASURED = Measured("A step", "abc", "2026-01-01", 1.5, MACHINE, (RATIO,))


def test_every_sign_and_every_metric_is_explained() -> None:
    lines = (DOCS / "is_it_learning.md").read_text(encoding="utf-8").splitlines()
    anchors = {line.lstrip("# ").lower().replace(" ", "-") for line in lines if line.startswith("#")}
    assert {*SIGNS} <= anchors
    listed = {row.split("|")[1].strip().partition("`](#")[0].lstrip("[`") for row in lines if row.startswith("| [`")}
    assert listed == {*SIGNS}
    explained = {name for row in lines if row.startswith("| `") for name in row.split("|")[1].split("`")[1::2]}
    assert {*METRICS} <= explained


@pytest.mark.parametrize(
    ("row", "met"),
    [
        # Of the rounds' ratios, 1.5, .25 and .25; the ratio of the medians is .5.
        (RATIO, True),
        (replace(RATIO, at_most=0.24), False),
        (replace(RATIO, at_most=None, at_least=0.25), True),
        (replace(RATIO, at_most=None, at_least=0.26), False),
        (Row(what="help", unit="s", ours=(0.2, 0.9, 0.3), at_most=0.3), True),
        (Row(what="rate", unit="rows/s", ours=(5.0,), at_least=6.0), False),
    ],
)
def test_a_goal_is_met_by_the_median_of_the_ratios_or_of_the_figures_alone(row: Row, met: bool) -> None:
    assert row.met is met


def test_storing_a_module_replaces_its_table_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "FIGURES", tmp_path / "figures.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text(f"before\n{page.BEGIN}{page.END}after\n")
    page.store("start", replace(MEASURED, title="The start", rows=(replace(RATIO, what="first line"),)))
    page.store("step", MEASURED)
    page.store("step", replace(MEASURED, rows=(replace(RATIO, what="another step"),)))
    text = page.PAGE.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    tables = [line for line in text.splitlines() if line.startswith("| ") and "TRL" in line]
    assert tables == [f"| {what} | 2 s | 4 s: TRL | 0.25 | at most 0.25 |" for what in ("first line", "another step")]


@pytest.mark.parametrize("shown", sorted((DOCS.parent / "README.md", *DOCS.glob("*.md"))), ids=lambda path: path.name)
def test_every_digest_of_a_run_names_the_processor_that_gave_it(shown: Path) -> None:
    *outputs, _ = shown.read_text(encoding="utf-8").split("<!-- end -->")
    found = [each.rpartition("<!-- output: ")[2] for each in outputs if "<!-- output: " in each]
    assert all(("policy digest " in each) == ("\nThe digest is that of " in each) for each in found)


def test_the_page_has_the_figures_that_are_stored() -> None:
    assert page.tables(page.read_figures()) in page.PAGE.read_text(encoding="utf-8")


def test_the_image_has_every_page_that_a_message_names() -> None:
    """`.dockerignore` leaves out everything but what it names."""
    checkout = DOCS.parent
    kept = [line[1:] for line in (checkout / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    rooms = ("flows", "tasks", "grpo_core", "configs")
    sources = [file for room in rooms for file in (checkout / room).rglob("*.py")]
    named = {each for file in sources for each in re.findall(r"docs/\w+\.md", file.read_text(encoding="utf-8"))}
    assert "docs/is_it_learning.md" in named
    for path in named:
        assert (checkout / path).is_file()
        assert any(fnmatch(path, each) for each in kept), path
