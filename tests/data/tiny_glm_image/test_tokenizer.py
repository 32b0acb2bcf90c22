"""Any text has ids, and they give the text back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.shapes import all_scenes
from data.tiny_glm_image.components import IMAGE_END_ID, IMAGE_START_ID, VISION_VOCAB_SIZE, build_tokenizer

TOKENIZER = build_tokenizer()


@pytest.mark.parametrize(
    "text", ["你好，画一个红色的圆", 'a sign that says "OPEN 24"', "it's “new”", "🙂👩‍🚀", "\n\t ", "redcircle"]
)
def test_unseen_text_round_trips(text: str) -> None:
    ids = TOKENIZER(text).input_ids
    assert min(ids) >= VISION_VOCAB_SIZE
    assert TOKENIZER.decode(ids) == text


@given(st.text(max_size=40).filter(lambda text: "<" not in text))
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


def test_a_caption_has_one_id_a_word() -> None:
    for scene in all_scenes():
        assert len(TOKENIZER(scene.caption).input_ids) == len(scene.caption.split())


def test_an_unknown_word_is_its_bytes() -> None:
    # "zebra" with the space before it is six bytes; each is one id.
    assert len(TOKENIZER("a zebra").input_ids) == 1 + 6


def test_grid_tags_and_image_marks_are_single_ids() -> None:
    ids = TOKENIZER(f"<sop>8 8<eop>{TOKENIZER.bos_token}{TOKENIZER.eos_token}").input_ids
    assert len(ids) == 6
    assert ids[-2:] == [IMAGE_START_ID, IMAGE_END_ID]


def test_pads_go_to_the_left() -> None:
    ids = TOKENIZER(["red", "a red circle"], padding=True).input_ids
    assert ids[0][:2] == [TOKENIZER.pad_token_id] * 2
    assert ids[0][2] == TOKENIZER("red").input_ids[0]
