import base64
import io
import json
import math
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin
from pydantic import ValidationError

from grpo_core.rewards.remote import wire
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch
from tests.grpo_core.rewards.conftest import make_batch, make_texts, noise, refusal


def read(body: bytes) -> ScoringBatch:
    return wire.read_batch(wire.ScoreRequest.model_validate_json(body))


def test_images_come_through_to_the_bit() -> None:
    images = [noise(0, 33, 17), Image.new("RGBA", (5, 4), (10, 20, 30, 128)), noise(1, 1, 1).convert("L")]
    batch = make_batch(images, [noise(2, 8, 8), None, None])
    got = read(wire.write_request("mine", batch, with_targets=True))
    assert np.array_equal(np.asarray(got.images[0]), np.asarray(images[0]))
    # Half over white.
    assert got.images[1].getpixel((0, 0)) == (132, 137, 142)
    target = got.targets[0]
    assert target is not None
    assert np.array_equal(np.asarray(target), np.asarray(noise(2, 8, 8)))
    assert got.targets[1:] == [None, None]
    assert read(wire.write_request("mine", batch, with_targets=False)).targets == [None] * 3


def test_images_in_prompts_come_through_where_they_are_asked_for() -> None:
    batch = make_texts("a", "b", source_images=[[noise(0, 9, 5), noise(1, 3, 4)], []])
    got = read(wire.write_request("mine", batch, with_targets=False, with_sources=True)).source_images
    assert [[np.asarray(image).tolist() for image in images] for images in got] == [
        [np.asarray(image).tolist() for image in images] for images in batch.source_images
    ]
    assert read(wire.write_request("mine", batch, with_targets=True)).source_images == ()


def test_their_pixels_count() -> None:
    batch = make_batch([noise(0, 2, 2)], source_images=[[noise(0, 3, 5), noise(1, 3, 4)]])
    request = wire.ScoreRequest.model_validate_json(
        wire.write_request("mine", batch, with_targets=False, with_sources=True)
    )
    assert wire.declared_pixels(request) == 4 + 15 + 12


@given(
    st.lists(
        st.tuples(
            st.text(max_size=20), st.text(max_size=20), st.none() | st.integers() | st.lists(st.text(max_size=3))
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=50, deadline=None)
def test_texts_and_columns_come_through(rows: list[tuple[str, str, Any]]) -> None:
    batch = make_texts(
        *(row[1] for row in rows),
        prompts=[row[0] for row in rows],
        images=[],
        targets=[None] * len(rows),
        columns={"extra": [row[2] for row in rows]},
        group_ids=["g"] * len(rows),
        token_ids=[[i, 2] for i in range(len(rows))],
    )
    assert read(wire.write_request("mine", batch, with_targets=True)) == batch


def test_metadata_stays_at_home() -> None:
    image = noise(0, 8, 8)
    notes = PngImagePlugin.PngInfo()
    notes.add_text("prompt", "private words")
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=notes)
    content = base64.b64decode(wire.encode_image(Image.open(buffer), "here"))
    assert b"private" in buffer.getvalue()
    assert b"private" not in content


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def header(width: int, height: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


PNG = b"\x89PNG\r\n\x1a\n"


def png_of(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        "not base64: äöü",
        "AAA",
        b"not an image, but long enough for a header",
        png_of(Image.new("RGB", (9, 9)), "JPEG"),
        PNG + header(100_000, 100_000) + chunk(b"IDAT", b""),
        PNG + header(8192, 2049) + chunk(b"IDAT", b""),
        PNG + header(8193, 1) + chunk(b"IDAT", b""),
        PNG + header(0, 9) + chunk(b"IDAT", b""),
        PNG + header(9, 9),
        PNG + header(9, 9) + header(100_000, 100_000) + chunk(b"IDAT", b""),
        PNG + header(9, 9) + header(4096, 4096) + chunk(b"IDAT", b""),
        PNG + chunk(b"tEXt", bytes(8)) + header(4096, 4096) + chunk(b"IDAT", b""),
        PNG + header(9, 9) + chunk(b"IDAT", zlib.compress(b"x")) + chunk(b"IEND", b""),
        PNG + header(9, 9) + chunk(b"iCCP", b"a\0\0" + zlib.compress(b"\0" * 2**22)),
        png_of(noise(0, 64, 64))[:-200],
    ],
)
def test_what_is_no_image_or_too_large_is_refused(content: bytes | str) -> None:
    text = content if isinstance(content, str) else base64.b64encode(content).decode()
    assert refusal(wire.decode_image, text, "sample s")[0] == "sample s"


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, b"x"])
def test_columns_that_json_cannot_express(value: object) -> None:
    batch = make_texts("c", columns={"x": [value]})
    assert refusal(wire.write_request, "mine", batch, with_targets=True)[0] == "columns of the prompt file"


def sample(**more: Any) -> dict[str, Any]:
    return {"sample_id": "s", "prompt": "p", "completion": "c", "columns": {}} | more


def request(*samples: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"protocol": 1, "reward": "mine", "samples": list(samples)} | more


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (request(sample(), protocol=2), "protocol"),
        (request(), "samples"),
        (request(sample(image="x")), "an image or a completion"),
        (request(sample(completion=None)), "an image or a completion"),
        (request(sample(), sample(completion=None, image="x")), "the same fields"),
        (request(sample(), sample(columns={"a": 1})), "the same fields and columns"),
        (request(sample(), sample(group_id="g")), "the same fields"),
        (request(sample(colour="red")), "samples.0.colour"),
        (request(sample(token_ids=["1"])), "samples.0.token_ids.0"),
        (request(sample(), weight=1), "weight"),
        (request({"prompt": "p", "completion": "c"}), "samples.0.sample_id"),
    ],
)
def test_requests_are_checked(content: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError) as error:
        wire.ScoreRequest.model_validate_json(json.dumps(content))
    assert fault in wire.first_error(error.value)
    wire.ScoreRequest.model_validate_json(json.dumps(request(sample())))


def answer(*scores: dict[str, Any], **more: Any) -> wire.ScoreAnswer:
    return wire.ScoreAnswer.model_validate(
        {"protocol": 1, "reward": "mine", "version": "1", "scores": list(scores)} | more
    )


def test_scores_are_read() -> None:
    got = wire.read_scores(
        answer(
            {"sample_id": "a", "value": 0.1, "raw": -3.5},
            {"sample_id": "b", "value": None, "raw": None, "failure": None},
            {"sample_id": "c", "value": None, "failure": "its service is down"},
            {"sample_id": "d", "value": 7, "later": "field"},
        ),
        list("abcd"),
    )
    assert got == [Score(0.1, -3.5), NOT_APPLICABLE, Score.failed("its service is down"), Score(7.0, 7.0)]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a"], "2 scores for 1 samples"),
        (["a", "b", "c"], "2 scores for 3"),
        (["b", "a"], "sample 'a' where 'b'"),
    ],
)
def test_scores_of_other_samples_are_refused(ids: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wire.read_scores(answer({"sample_id": "a", "value": 1.0}, {"sample_id": "b", "value": 1.0}), ids)
