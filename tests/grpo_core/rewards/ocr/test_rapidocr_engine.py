import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
import rapidocr
from PIL import Image, ImageDraw, ImageFont

from grpo_core.rewards.ocr import engines as rapidocr_engine
from grpo_core.rewards.ocr.engines import MODELS, RapidEngine, reads_both_ways
from grpo_core.rewards.ocr.lines import UNREAD, unread
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
        hash = next(e for e in rapidocr_engine.metadata.files("rapidocr") or () if e.name == MODELS["detection"]).hash

        def locate(self) -> Path:
            return tmp_path / self.name

    if change == "spoil":
        (tmp_path / Entry.name).write_bytes(b"half a model")
    monkeypatch.setattr(rapidocr_engine.metadata, "files", lambda name: [Entry()])
    rapidocr_engine._find_model_file.cache_clear()
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
