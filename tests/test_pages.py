"""Blocks of README.md and docs/ run as printed; settings, links and stated defaults are true, generated parts fresh."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import configs
from configs.schema import RunConfig
from configs.training import DenoisingUpdateSection, ParitySection, UpdateSection
from grpo_core.rollouts.streams import STREAMS
from tasks.process import CHECKOUT
from tasks.reports.text import METRICS
from tasks.runs.signs import SIGNS
from tests.bench import page as results
from tests.bench.page import Machine, Measured, Row
from tests.configs import settings_page
from tests.flows import commands_page
from tests.pages import blocks, pages, prepare, prose, run


@pytest.fixture(scope="module")
def after_the_readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which somebody ran all blocks of the README."""
    folder = tmp_path_factory.mktemp("readme")
    prepare(folder, iterations=2)
    for block in blocks(CHECKOUT / "README.md"):
        if block.runs_here:
            run(block, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", pages()[1:], ids=lambda page: page.name)
def test_every_block_runs_in_order(page: Path, after_the_readme: Path, tmp_path: Path) -> None:
    here = [block for block in blocks(page) if block.runs_here]
    if not here:
        return
    folder = tmp_path / "checkout"
    shutil.copytree(after_the_readme, folder, symlinks=True)
    for block in here:
        run(block, folder)


def known_keys() -> dict[str, str]:
    """Each key of docs/settings.md as a path, with its type, or the path of a section with the same keys."""
    found, section = {}, ""
    for line in settings_page.PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("All keys of `data` but "):
            but = ("data.datasets", "data.curriculum")
            of_data = [key for key in found if key.startswith("data.") and not key.startswith(but)]
            found |= {key.replace("data", section, 1): key for key in of_data}
        elif row := re.match(r"- `([\w.]+)(?:: [^`]*)?`(?: \((.*?)\))?: ", line):
            same = re.search(r"keys as of `([\w.]+)`", line)
            found[f"{section}.{row[1]}"] = f"{section}.{same[1]}" if same else row[2] or ""
    return found


def unknown(value: object, path: str, known: dict[str, str]) -> Iterator[str]:
    """Yield the paths of keys that no configuration has."""
    if path and path not in known and not any(each.startswith(f"{path}.") for each in known):
        yield path
    elif isinstance(value, list) and any(each.startswith(f"{path}.N.") for each in known):
        for each in value:
            yield from unknown(each, f"{path}.N", known)
    elif known.get(path) in known:
        yield from unknown(value, known[path], known)
    elif isinstance(value, dict) and "mapping" not in known.get(path, ""):
        for key, inner in value.items():
            yield from unknown(inner, f"{path}.{key}".removeprefix("."), known)


def test_settings_in_yaml_exist() -> None:
    known = known_keys()
    assert len(known) > 100
    assert list(unknown({"policy": {"model": "m", "modle": "m"}, "rewards": [{"weigth": 1}]}, "", known)) == [
        "policy.modle",
        "rewards.N.weigth",
    ]
    for page in pages():
        for block in blocks(page):
            content = yaml.safe_load(block.text) if block.kind == "yaml" else {}
            if set(content) <= set(RunConfig.model_fields):
                assert list(unknown(content, "", known)) == [], block.place


def test_links_lead_to_pages_sections_and_pictures() -> None:
    headings = {page.name: _anchors(page) for page in pages()}
    for page in pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if not target.startswith("http"):
                path, _, anchor = target.partition("#")
                file = page.parent / path if path else page
                assert file.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in headings[file.name], f"{page.name}: {target}"


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_page_has_every_command_with_every_option() -> None:
    assert commands_page.PAGE.read_text(encoding="utf-8") == commands_page.page()


def test_the_pages_are_fresh() -> None:
    hint = "run python -m tests.configs.settings_page"
    assert settings_page.page() in settings_page.PAGE.read_text(encoding="utf-8"), hint
    assert settings_page.trl_section() in settings_page.TRL_PAGE.read_text(encoding="utf-8"), hint


def test_every_section_is_there_and_every_key_has_an_effect() -> None:
    assert {title.partition(".")[0] for title in settings_page.SECTIONS} == set(RunConfig.model_fields)
    rows = settings_page.page().splitlines()
    assert [row for row in rows if row.startswith("- ") and not re.search(r"[`)]: \S", row)] == []


@pytest.mark.parametrize(("target", "offline"), [("train", False), ("test", True), ("test-slow", True)])
def test_only_a_run_of_the_user_may_download(target: str, offline: bool) -> None:
    command = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.installed", target, "CONFIG=mine.yaml"]
    # `make test` hands its own settings to what it starts.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"
    }
    made = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True)
    (line,) = made.stdout.splitlines()
    assert ("HF_HUB_OFFLINE=1" in line) is offline
    assert ("grpo train mine.yaml" in line) is not offline


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


def test_a_row_without_a_goal_or_a_figure() -> None:
    rows = (replace(RATIO, at_most=None), Row(what="all", unit="", ours=(), left_out="it needs 46.9 GiB"))
    assert list(results.cells(rows)) == [
        ("step", "2 s", "4 s: TRL", "0.25", ""),
        ("all", "it needs 46.9 GiB", "", "", ""),
    ]


def test_storing_a_module_replaces_its_table_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FIGURES", tmp_path / "figures.json")
    monkeypatch.setattr(results, "PAGE", tmp_path / "page.md")
    results.PAGE.write_text(f"before\n{results.BEGIN}{results.END}after\n")
    results.store("start", replace(MEASURED, title="The start", rows=(replace(RATIO, what="first line"),)))
    results.store("step", MEASURED)
    results.store("step", replace(MEASURED, rows=(replace(RATIO, what="another step"),)))
    text = results.PAGE.read_text()
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
    assert results.tables(results.read_figures()) in results.PAGE.read_text(encoding="utf-8")


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
