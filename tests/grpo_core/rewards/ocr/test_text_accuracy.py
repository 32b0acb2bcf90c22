import itertools

import pytest
from PIL import Image

from grpo_core.rewards.ocr.engines import RapidEngine
from grpo_core.rewards.ocr.text_accuracy import TextAccuracyReward
from grpo_core.rewards.reward import provenance_of
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringError
from tests.grpo_core.rewards.conftest import flat, make_batch, refusal
from tests.grpo_core.rewards.ocr.lettering import CHINESE, CHINESE_TEXTS, COLOURS, LATIN, draw

ENGLISH = (
    *("HELLO WORLD", "Open 24 Hours", "Grand Opening", "No Parking", "Coffee & Tea", "Happy Birthday", "Exit 7"),
    *("Sale 50% Off", "Wish You Were Here", "Fresh Bread Daily", "Chapter One", "Mind the Gap", "Beware of Dog"),
    *("Platform 9", "Level Up", "Thank You", "Room 204", "Winter Festival 2024", "Quiet Please", "Library"),
    *("Danger High Voltage", "Spring Collection", "Made in Italy", "Wet Paint", "The End", "Lost and Found"),
    *("Baggage Claim", "Jazz Night"),
)
TARGET = "Fresh Bread"


def score_one(image: Image.Image, *texts: str, reward: TextAccuracyReward | None = None) -> Score:
    prompt = "A shop with " + " and ".join(f'"{text}"' for text in texts)
    (score,) = (reward or TextAccuracyReward()).score(make_batch([image], prompts=[prompt]))
    return score


def wrapped(text: str) -> list[str]:
    words = text.split()
    half = (len(words) + 1) // 2
    return [" ".join(words[:half]), " ".join(words[half:])] if len(words) > 2 else [text]


@pytest.mark.parametrize(("count", "right"), [(3, 3), pytest.param(28, 26, marks=pytest.mark.slow)])
def test_english_in_every_font_and_colour(count: int, right: int) -> None:
    looks = zip(ENGLISH[:count], itertools.cycle(LATIN), itertools.cycle(COLOURS), strict=False)
    images = [draw(*wrapped(text), font=font, colours=colours) for text, font, colours in looks]
    scores = TextAccuracyReward().score(make_batch(images, prompts=[f'A sign "{text}"' for text in ENGLISH[:count]]))
    assert len(scores) == count
    assert sum(score == Score(1.0, 0.0) for score in scores) >= right


@pytest.mark.slow
def test_chinese_in_every_colour() -> None:
    looks = zip(CHINESE_TEXTS, itertools.cycle(COLOURS), strict=False)
    images = [draw(text, font=CHINESE, colours=colours) for text, colours in looks]
    scores = TextAccuracyReward().score(make_batch(images, prompts=[f"写着「{text}」的牌子" for text in CHINESE_TEXTS]))
    assert len(scores) == 8
    assert sum(score == Score(1.0, 0.0) for score in scores) >= 7


@pytest.mark.parametrize(
    ("lines", "errors", "longer"),
    [
        # Ten letters are wanted.
        (["Fresh Bread", "Every Day"], 8, 18),
        (["Fresh Bred"], 1, 10),
    ],
)
def test_surplus_and_missing_text_cost(lines: list[str], errors: int, longer: int) -> None:
    assert score_one(draw(*lines), TARGET) == Score(1 - errors / longer, errors)


def test_text_on_its_head_has_full_marks_only_where_lines_are_turned() -> None:
    image = draw(TARGET).rotate(180)
    assert score_one(image, TARGET).value == 0.0
    assert score_one(image, TARGET, reward=TextAccuracyReward(cls=True)) == Score(1.0, 0.0)


def test_several_texts_in_whatever_order() -> None:
    image = draw("Every Day", "Fresh Bread")
    assert score_one(image, "Fresh Bread", "Every Day") == Score(1.0, 0.0)
    # One of three is missing: 4 letters of 22.
    assert score_one(image, "Fresh Bread", "Open", "Every Day") == Score(1 - 4 / 22, 4.0)


def test_an_image_too_long_for_its_width_is_refused() -> None:
    assert TextAccuracyReward().needs.max_aspect == 8.0
    for size in ((4, 2000), (2000, 4), (81, 10)):
        refused = refusal(score_one, Image.new("RGB", size), TARGET)
        assert refused == ("rewards.text_accuracy, sample s0", f"image of {size[0]}x{size[1]} pixels")
    assert score_one(Image.new("RGB", (80, 10)), TARGET).value == 0.0


def test_a_prompt_without_text_has_no_score_and_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RapidEngine, "read", lambda *_: pytest.fail("read"))
    prompts = ["It's a dog's bowl", 'an "" sign', "no quotes"]
    batch = make_batch([flat(255)] * 3, prompts=prompts)
    assert TextAccuracyReward().score(batch) == [NOT_APPLICABLE] * 3


def test_a_column_stands_before_the_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RapidEngine, "read", lambda *_: ("Every Day", "Fresh Bread"))
    given = ["Fresh Bread Every Day", ["Fresh Bread", "Every Day"], ["Fresh Bread", " "], None, "", []]
    batch = make_batch([flat(255)] * 6, prompts=['A "Shop"'] * 6, columns={"writing": given})
    reward = TextAccuracyReward(column="writing")
    assert reward.needs.column == "writing"
    scores = reward.score(batch)
    assert scores[0].value is not None
    assert scores[0].value < 0.6
    assert scores[1:] == [Score(1.0, 0.0), Score(1 - 8 / 18, 8.0), *[NOT_APPLICABLE] * 3]


@pytest.mark.parametrize("given", [7, {"text": "x"}, ["x", None], True])
def test_a_column_without_text_is_refused(given: object) -> None:
    batch = make_batch([flat(255)], columns={"writing": [given]})
    refused = refusal(TextAccuracyReward(column="writing").score, batch)
    assert refused == ("rewards.text_accuracy, sample s0, column writing", given)


def test_a_breakdown_is_tried_again_and_then_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    read, tries = RapidEngine.read, itertools.count(1)

    def break_down_twice(engine: RapidEngine, image: Image.Image) -> tuple[str, ...]:
        if next(tries) <= 2:
            raise ScoringError("rapidocr broke down over it")
        return read(engine, image)

    monkeypatch.setattr(RapidEngine, "read", break_down_twice)
    image = draw("Library", size=128)
    assert score_one(image, "Library", reward=TextAccuracyReward(attempts=3)) == Score(1.0, 0.0)
    tries = itertools.count(1)
    failed = score_one(image, "Library", reward=TextAccuracyReward(attempts=2))
    assert failed == Score.failed("rapidocr broke down over it, in 2 attempt(s)")
    assert next(tries) == 3


def test_provenance_has_the_settings_that_determine_the_scores() -> None:
    record = provenance_of(TextAccuracyReward(attempts=5))
    settings = {"mode": "ned", "column": None, "engine": "rapidocr"}
    assert record["settings"] == {**settings, "cls": False, "limit_side_len": 320, "max_side_len": 768}
    assert str(record["version"]).startswith("4+rapidocr-3.")
    assert record == provenance_of(TextAccuracyReward(cls=False, limit_side_len=320, max_side_len=768))
    assert record["settings_digest"] != provenance_of(TextAccuracyReward(max_side_len=512))["settings_digest"]
    assert TextAccuracyReward().preflight() == []


def test_the_other_engine_reads_with_its_own_settings() -> None:
    reward = TextAccuracyReward(engine="tesseract")
    if reward.preflight():
        pytest.skip("no Tesseract: apt-get install tesseract-ocr")
    assert reward.settings() == {"mode": "ned", "column": None, "engine": "tesseract", "languages": "eng"}
    assert reward.version.startswith("4+tesseract-")
    assert set(reward.weight_digests()) == {"eng"}
    assert score_one(draw("Library"), "Library", reward=reward) == Score(1.0, 0.0)
    assert score_one(draw("Library", "Library"), "Library", reward=reward) == Score(0.5, 7.0)
    assert any("xyz" in problem for problem in TextAccuracyReward(engine="tesseract", languages="eng+xyz").preflight())
