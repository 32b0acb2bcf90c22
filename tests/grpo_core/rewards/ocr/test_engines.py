"""RapidOCR and Tesseract: what they read, in which order, how sure they are, and what is missing to run them."""

import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
import rapidocr
from PIL import Image, ImageDraw, ImageFont

from grpo_core.rewards.ocr import engines
from grpo_core.rewards.ocr.engines import MODELS, RapidEngine, TesseractEngine, reads_both_ways
from grpo_core.rewards.ocr.lines import UNREAD, Line, Rectangle, find_giant_writing, in_reading_order, unread
from grpo_core.rewards.scoring_batch import ScoringError
from tests.grpo_core.rewards.conftest import flat, refusal
from tests.grpo_core.rewards.ocr.lettering import CHINESE, CHINESE_TEXTS, LATIN, draw

ENGINE = RapidEngine(turn_lines=False, limit_side_len=320, max_side_len=768)
TURNING = RapidEngine(turn_lines=True, limit_side_len=320, max_side_len=768)


def test_small_print_in_two_rows_is_read_row_by_row() -> None:
    # The library alone sorts rows less than ten pixels apart from left to right.
    image = Image.new("RGB", (64, 64), "white")
    image.paste(draw("Tea", size=30, share=1.0).crop((0, 8, 30, 22)), (32, 10))
    image.paste(draw("Bar", size=30, share=1.0).crop((0, 8, 30, 22)), (1, 24))
    assert ENGINE.read(image) == ("Tea", "Bar")


def test_two_signs_side_by_side_are_read_row_by_row() -> None:
    image = Image.new("RGB", (320, 160), "white")
    image.paste(draw("Grand", "Opening", size=150), (0, 5))
    image.paste(draw("Half", "Price", size=150), (170, 5))
    assert ENGINE.read(image) == ("Grand", "Half", "Opening", "Price")


def test_nothing_is_read_off_a_blank_image() -> None:
    assert ENGINE.read(flat(255, 64, 64)) == ()
    assert ENGINE.read(flat(0, 1, 1)) == ()


def test_only_the_lines_that_stand_upright_are_accepted_whatever_another_engine_reads() -> None:
    image = Image.new("RGB", (128, 256), "white")
    image.paste(draw("Bread", size=128), (0, 0))
    image.paste(draw("Danger", size=128).rotate(180), (0, 128))
    assert ENGINE.read(image) == ("Bread", unread("Danger"))
    assert TURNING.read(image) == ("Bread", "Danger")
    assert ENGINE.read(image) == ("Bread", unread("Danger"))


@pytest.mark.parametrize("degrees", [90, -90])
@pytest.mark.parametrize("lines", [pytest.param(["Library"], marks=pytest.mark.slow), ["Grand", "Opening"]])
def test_text_turned_a_quarter_is_read_either_way_and_in_order(degrees: int, lines: list[str]) -> None:
    assert ENGINE.read(draw(*lines).rotate(degrees)) == tuple(lines)


def test_chinese_columns_are_read_from_the_right() -> None:
    image = Image.new("RGB", (256, 256), "white")
    for column, text in enumerate(CHINESE_TEXTS[:2]):
        for row, character in enumerate(text):
            tile = draw(character, size=60, font=CHINESE, share=1.0)
            image.paste(tile, (170 - 130 * column, 4 + 62 * row))
    assert ENGINE.read(image) == CHINESE_TEXTS[:2]


def test_what_is_seen_and_not_made_out_is_unread() -> None:
    image = Image.new("RGB", (128, 128), "white")
    ImageDraw.Draw(image).ellipse((14, 34, 114, 94), fill="brown")
    assert ENGINE.read(image) == (UNREAD,)


def test_large_images_are_shrunk_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    detect = rapidocr.RapidOCR.detect_and_crop

    def look(self: object, img: np.ndarray, op_record: object) -> object:
        seen.append(img.shape[:2])
        return detect(self, img, op_record)

    monkeypatch.setattr(rapidocr.RapidOCR, "detect_and_crop", look)
    small = RapidEngine(turn_lines=False, limit_side_len=64, max_side_len=256)
    assert small.read(draw("Exit", size=512)) == ("Exit",)
    # The second look is that from afar.
    assert seen == [(256, 256), (128, 128)]


def test_threads_read_the_same() -> None:
    images = [draw(text, size=96) for text in ("Exit", "Today")]
    alone = [ENGINE.read(image) for image in images]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ENGINE.read, images)) == alone


def test_models_are_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    # Settings that no other test has, so that the models are loaded here.
    assert RapidEngine(turn_lines=True, limit_side_len=96, max_side_len=512).read(draw("LIBRARY", size=96)) == (
        "LIBRARY",
    )


def test_a_breakdown_of_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*args: object) -> None:
        raise cv2.error("no memory for\nthe image")

    monkeypatch.setattr(rapidocr.RapidOCR, "detect_and_crop", break_down)
    with pytest.raises(ScoringError, match=r"rapidocr broke down over it \(error: the image\)"):
        ENGINE.read(draw("Exit", size=64))


def test_digests_and_version_name_models_and_libraries() -> None:
    digests = ENGINE.model_digests()
    assert set(digests) == set(MODELS)
    assert len({*digests.values()}) == 3
    assert ENGINE.find_problems() == []
    assert ENGINE.version.startswith("rapidocr-3.")
    assert "+onnxruntime-" in ENGINE.version


@pytest.mark.parametrize(("change", "problem"), [("remove", "is missing"), ("spoil", "is not the one installed")])
def test_missing_and_changed_models_are_found(
    change: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Entry:
        name = MODELS["detection"]
        hash = next(e for e in engines.metadata.files("rapidocr") or () if e.name == MODELS["detection"]).hash

        def locate(self) -> Path:
            return tmp_path / self.name

    if change == "spoil":
        (tmp_path / Entry.name).write_bytes(b"half a model")
    monkeypatch.setattr(engines.metadata, "files", lambda name: [Entry()])
    engines._find_model_file.cache_clear()
    (found,) = ENGINE.find_problems()
    assert problem in found
    assert refusal(ENGINE.read, flat(255)) == ("rewards.text_accuracy.engine", "rapidocr")


@pytest.mark.parametrize(
    ("upright", "turned", "both"),
    [
        ("NOON", "NOON", True),
        ("up", "dn", True),
        ("ZOOS", "S00Z", True),
        ("69", "69", True),
        ("HELLO", "HELLO", False),
        ("SOS", "SIS", False),
        ("OPEN", "OPEN", False),
    ],
)
def test_writing_that_reads_both_ways(upright: str, turned: str, both: bool) -> None:
    assert reads_both_ways(upright, turned) == both


@pytest.mark.parametrize("size", [(512, 128), pytest.param((512, 512), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "text", ["NOON", *(pytest.param(text, marks=pytest.mark.slow) for text in ("up", "O", "NO ON", "SIS", "ZOOS"))]
)
def test_upright_writing_that_reads_both_ways_is_not_passed_over(text: str, size: tuple[int, int]) -> None:
    font = ImageFont.truetype(str(LATIN[1]), 64)
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).text((40, size[1] // 2 - 40), text, font=font, fill="black")
    assert "".join(ENGINE.read(image)).replace("0", "O") == text


ENGLISH = TesseractEngine("eng")
installed = pytest.mark.skipif(shutil.which("tesseract") is None, reason="no Tesseract: apt-get install tesseract-ocr")


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    asked = (engines._ask_version, engines._ask_languages)
    for ask in asked:
        ask.cache_clear()
    yield
    for ask in asked:
        ask.cache_clear()


@pytest.fixture
def fake_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that stands before Tesseract on the path; to be filled in."""
    program = tmp_path / "tesseract"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return program


def test_words_of_low_confidence_are_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    pytesseract = pytest.importorskip("pytesseract")
    # A row of the layout, and two words of a line.
    places = {name: [0, 1, 1] for name in ("block_num", "par_num", "line_num")}
    boxes = {"left": [0, 4, 40], "top": [0, 4, 4], "height": [64, 9, 9]}
    table = {"text": ["", "SALE", "d1vs"], "conf": [-1, 50.0, 49.9], **places, **boxes}
    monkeypatch.setattr(pytesseract, "image_to_data", lambda *_, **__: table)
    assert ENGLISH.read(flat(255)) == (f"SALE {unread('d1vs')}",)


@installed
def test_lines_come_from_above() -> None:
    assert ENGLISH.read(draw("Grand", "Opening Today")) == ("Grand", "Opening Today")


@installed
def test_tesseract_reads_nothing_off_a_blank_image() -> None:
    assert ENGLISH.read(flat(255, 64, 64)) == ()
    assert ENGLISH.read(flat(0, 1, 1)) == ()


@installed
def test_chinese_is_read_where_it_is_installed() -> None:
    engine = TesseractEngine("chi_sim")
    if engine.find_problems():
        pytest.skip("no Chinese for Tesseract: apt-get install tesseract-ocr-chi-sim")
    (text,) = engine.read(draw("开业大吉", font=CHINESE))
    assert text.replace(" ", "") == "开业大吉"


@installed
def test_the_format_of_the_file_does_not_matter(tmp_path: Path) -> None:
    image = draw("Library", size=128)
    image.save(tmp_path / "image.gif")
    with Image.open(tmp_path / "image.gif") as opened:
        again = opened.convert("RGB")
        again.format = "JPEG"
        assert ENGLISH.read(again) == ENGLISH.read(image) == ("Library",)


@installed
def test_version_and_digests_name_program_and_languages() -> None:
    assert ENGLISH.version.split("-")[0] == "tesseract"
    assert ENGLISH.version.split("-")[1][0].isdigit()
    assert set(ENGLISH.model_digests()) == {"eng"}
    assert ENGLISH.find_problems() == []


@installed
def test_a_language_that_is_not_installed_is_named_with_its_package() -> None:
    (problem,) = TesseractEngine("eng+xyz_abc").find_problems()
    assert "'xyz_abc'" in problem
    assert "tesseract-ocr-xyz-abc" in problem
    refused = refusal(TesseractEngine("xyz_abc").read, draw("Exit", size=64))
    assert refused == ("rewards.text_accuracy.languages", "xyz_abc")


def test_a_missing_program_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = ENGLISH.find_problems()
    assert "apt-get install tesseract-ocr" in problem
    for use in (lambda: ENGLISH.read(flat(255)), lambda: ENGLISH.version):
        assert refusal(use) == ("rewards.text_accuracy.engine", "tesseract")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert any("grpo-staged[tesseract]" in problem for problem in ENGLISH.find_problems())
    monkeypatch.setitem(sys.modules, "pytesseract", None)
    assert refusal(ENGLISH.read, flat(255)) == ("rewards.text_accuracy.engine", "tesseract")


@installed
def test_a_breakdown_and_a_delay_are_named(fake_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("tesseract", path="/usr/bin:/usr/local/bin")
    answer = f'#!/bin/sh\ncase "$1" in --*) exec {real} "$@";; esac\n'
    fake_program.write_text(answer + "echo no memory >&2\nexit 1\n")
    with pytest.raises(ScoringError, match=r"tesseract broke down over it.*no memory"):
        ENGLISH.read(flat(255))
    monkeypatch.setattr(engines, "TIMEOUT_SECONDS", 0.2)
    fake_program.write_text(answer + "exec sleep 5\n")
    with pytest.raises(ScoringError, match="timeout"):
        ENGLISH.read(flat(255))


def line(text: str, left: float, top: float, height: float = 10) -> Line:
    return Line(text, left, top, top + height)


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        ([], ()),
        ([line("below", 0, 50), line("above", 90, 0)], ("above", "below")),
        ([line("right", 60, 0), line("left", 0, 0)], ("left", "right")),
        # A row that falls by four of ten pixels from word to word.
        ([line("three", 60, 8), line("one", 0, 0), line("two", 30, 4)], ("one", "two", "three")),
        # Rows of small print eight pixels apart.
        ([line("below", 0, 8, 6), line("above", 40, 0, 6)], ("above", "below")),
        # A price in large digits beside a small name.
        ([line("9.99", 60, 0, 40), line("Tea", 0, 15, 10)], ("Tea", "9.99")),
        # Half of the height is not enough.
        ([line("below", 0, 5), line("above", 40, 0)], ("above", "below")),
        ([line("left", 0, 4), line("right", 40, 0)], ("left", "right")),
    ],
)
def test_rows_from_above_and_words_from_the_left(lines: list[Line], texts: tuple[str, ...]) -> None:
    assert in_reading_order(lines) == texts
    assert in_reading_order(lines[::-1]) == texts


def test_falling_lines_are_read_from_the_right() -> None:
    columns = [Line(text, left, 0, 90, falls=True) for text, left in (("last", 0), ("first", 60))]
    assert in_reading_order(columns) == ("first", "last")
    assert in_reading_order([*columns, Line("rising", 30, 0, 90)]) == ("last", "rising", "first")


@pytest.mark.parametrize(
    ("known", "found"),
    [
        (((0, 0, 20, 4),), ["AB"]),
        (((0, 16, 99, 99),), ["AB"]),
        (((-9, 0, 4, 20),), ["AB"]),
        (((16, -9, 99, 99),), ["AB"]),
        (((30, 0, 99, 99), (0, 30, 99, 99)), ["AB"]),
        (((0, 0, 20, 4), (0, 16, 99, 99)), []),
        (((0, 0, 10, 10),), []),
    ],
)
def test_giant_writing_is_new_where_known_lines_cover_less_than_a_quarter(
    known: list[Rectangle], found: list[str]
) -> None:
    """Seen at half the size: 20 pixels a side in the image, of which a fifth a strip of 4."""
    assert find_giant_writing(flat(255, 256, 256), known, lambda _: [("AB", (0, 0, 10, 10))]) == found
