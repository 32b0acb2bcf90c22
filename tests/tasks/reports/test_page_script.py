"""The script of pages in a real browser; `apt-get install chromium`, or these tests are skipped."""

from pathlib import Path

import pytest
from PIL import Image

from flows.inspect_run import inspect_run
from tests.chromium import Tab, needs_chromium, opened_tab
from tests.tasks.reports.made_runs import RunMaker
from tests.tasks.reports.test_rescoring import page as rescoring_page
from tests.tasks.reports.test_run_page import EVIL

pytestmark = [needs_chromium, pytest.mark.slow]

STATUS = "document.querySelector('.values').textContent"


def text(tab: Tab, part: str) -> str:
    return str(tab.run(f"document.querySelector('[data-part={part}]').innerText.trim()"))


def cut_off(tab: Tab, path: Path) -> tuple[bool, bool]:
    """Whether the first table has a shadow at its left and at its right side, inside its border."""
    box = "document.querySelector('.scroll').getBoundingClientRect()"
    tab.screenshot(path)
    left, right, top = (round(tab.run(f"{box}.{side}")) for side in ("left", "right", "top"))
    with Image.open(path) as shot:
        row = [shot.convert("RGB").getpixel((x, top + 10)) for x in range(left + 2, right - 2)]
    return row[0] != row[30], row[-1] != row[-31]


def write_page(folder: Path, **options: object) -> Path:
    """A run of three iterations, evaluated before and after each."""
    maker = RunMaker(folder / "runs", planned=3, prompts=("a red square " + EVIL, "a blue square"), **options)
    for version in range(4):
        maker.evaluation(version, shift=version / 10)
    for number in (1, 2, 3):
        maker.iteration(number)
    inspect_run("made", root=str(folder / "runs"), html=folder / "page.html")
    return folder / "page.html"


def test_the_page_of_images_by_keyboard_and_pointer(tmp_path: Path) -> None:
    page = write_page(tmp_path)
    with opened_tab(tmp_path / "browser") as tab:
        for width in (1280, 390):
            tab.open(page.as_uri(), width=width, dark=width == 390)
            assert tab.run("document.documentElement.scrollWidth") <= width
            # The image of a held-out prompt is on the first screen, or on a phone's second.
            assert tab.run("document.querySelector('[data-part=stage] img').getBoundingClientRect().bottom") < 1688
        tab.open(page.as_uri())
        assert "ranranran" not in text(tab, "prompt")
        assert text(tab, "version").startswith("policy 3 reward 0.700 +0.300")
        tab.run("document.querySelector('[data-part=slider]').focus()")
        tab.press("Home")
        assert text(tab, "version") == "policy 0 reward 0.400"
        tab.press("ArrowRight")
        assert text(tab, "version").startswith("policy 1 reward 0.500 +0.100")
        shown = "document.querySelector('[data-part=stage] img').src"
        same_seed = "document.querySelector('[data-heldout] [data-seed] [data-frame=\"1\"] img').src"
        assert tab.run(shown) == tab.run(same_seed)
        tab.run("document.querySelector('[data-part=siblings] button:nth-child(3)').click()")
        assert text(tab, "version").startswith("policy 1 reward 1.000")
        tab.run("document.querySelector('[data-part=next]').click()")
        assert text(tab, "prompt") == "a blue square"
        # The curve says its values under the pointer, and by arrow keys.
        tab.point("[data-hero] .wide svg", 0.99)
        assert tab.run(STATUS).startswith("iteration 3")
        assert "held-out reward 0.8" in tab.run(STATUS)
        tab.run("document.querySelector('[data-hero] .wide svg').focus()")
        tab.press("ArrowLeft")
        assert tab.run(STATUS).startswith("iteration 2")
        tab.point("[data-hero] .wide svg", 0.03, click=True)
        assert text(tab, "version").startswith("policy 0")
        # Debiased, as TensorBoard smooths: (0.5 * 0.5 + 0.6) / 1.5 for the second of 0.5 and 0.6.
        smoothing = "document.querySelector('[data-smoothing] input')"
        tab.run(f"(e => {{ e.value = 0.5; e.dispatchEvent(new Event('input')) }})({smoothing})")
        tab.run("document.querySelector('[data-hero] .wide svg').focus()")
        tab.point("[data-hero] .wide svg", 0.67)
        assert "smoothed 0.5667" in tab.run(STATUS)
        # Another iteration's images, one at a time.
        opened = (
            "[...document.querySelectorAll('[data-iterations] details[open]')].map(e => e.dataset.iteration).join()"
        )
        assert tab.run(opened) == "2"
        tab.run("document.querySelector('[data-iterations] input').focus()")
        tab.press("ArrowLeft")
        assert tab.run(opened) == "1"
        tab.run("document.querySelector('[data-part=stage] img').focus()")
        tab.press("Enter")
        assert tab.run("document.querySelector('dialog').open")
        tab.press("Escape")
        assert not tab.run("document.querySelector('dialog').open")
        assert tab.problems == []
        assert set(tab.requests) == {page.as_uri()}


def test_the_page_of_texts_shows_hostile_ones_and_runs_nothing(tmp_path: Path) -> None:
    page = write_page(tmp_path, modality="text", datasets=(EVIL, "b"), labels=(EVIL.replace("/", "|"),))
    with opened_tab(tmp_path / "browser") as tab:
        tab.open(page.as_uri())
        shown = tab.run("document.body.innerText")
        assert "<script>alert" in shown
        assert "⟨U+202E⟩" in shown
        assert "\u202e" not in tab.run("document.documentElement.outerHTML")
        # Those of all seeds stand below one another, with their mean.
        assert text(tab, "stage").count("of group 0") == 4
        tab.run("document.querySelector('[data-part=next]').click()")
        assert text(tab, "stage").count("of group 1") == 4
        assert tab.problems == []
        assert set(tab.requests) == {page.as_uri()}


def test_hostile_text_stays_in_its_place_on_the_page_of_a_rescoring(tmp_path: Path) -> None:
    page, text = tmp_path / "page.html", EVIL + "x" * 10_000
    page.write_text(rescoring_page({("run", "s0"): text}, text, EVIL))
    with opened_tab(tmp_path / "browser") as tab:
        for width in (1280, 390):
            tab.open(page.as_uri(), width=width, dark=width == 390)
            assert tab.run("document.title").startswith("<script>alert")
            assert tab.run("document.documentElement.scrollWidth") <= width
            cards = "[...document.querySelectorAll('.moved article')]"
            assert tab.run(f"{cards}.map(e => e.scrollWidth - e.clientWidth)") == [0, 0]
            tab.run("document.querySelector('.scroll').scrollIntoView()")
            assert cut_off(tab, tmp_path / "shot.png") == (False, width == 390)
            tab.run("document.querySelector('.scroll').scrollLeft = 9999")
            assert cut_off(tab, tmp_path / "shot.png") == (width == 390, False)
        assert "<script>alert" in tab.run("document.querySelector('.moved .excerpt').innerText")
        assert "\u202e" not in tab.run("document.documentElement.outerHTML")
        assert tab.problems == []
        assert set(tab.requests) == {page.as_uri()}
