"""Blocks of README.md and docs/ run as printed, settings and links exist, generated pages are fresh; the Makefile."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from configs.schema import RunConfig
from tasks.process import CHECKOUT
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
