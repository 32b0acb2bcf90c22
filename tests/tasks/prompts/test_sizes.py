"""The size of a prompt's images: from the columns of its row, or the default."""

from typing import Any

import pytest

from grpo_core.errors import InputError
from grpo_core.image_size import ImageSize
from tasks.prompts.read import Prompt
from tasks.prompts.sizes import read_sizes

OWN = ImageSize(64, 64)


def read(*rows: dict[str, Any]) -> tuple[ImageSize, ...]:
    prompts = [Prompt(f"id{row}", "a cat", columns) for row, columns in enumerate(rows)]
    return read_sizes(prompts, source="cats.csv", default=OWN)


@pytest.mark.parametrize(
    ("columns", "size"),
    [
        ({}, OWN),
        ({"note": "512x768"}, OWN),
        ({"width": None, "height": None, "size": None}, OWN),
        ({"width": " ", "height": "", "size": ""}, OWN),
        ({"width": 512, "height": 768}, (512, 768)),
        ({"width": 512.0, "height": "768"}, (512, 768)),
        ({"size": "512x768"}, (512, 768)),
        ({"size": " 512 X 768 "}, (512, 768)),
        ({"size": "512×768", "width": 512, "height": 768}, (512, 768)),
        ({"size": None, "width": 512, "height": 768}, (512, 768)),
    ],
)
def test_a_size_is_read(columns: dict[str, Any], size: tuple[int, int]) -> None:
    assert read({}, columns) == (OWN, size)


@pytest.mark.parametrize(
    ("columns", "column"),
    [
        *(({"size": value}, "size") for value in ("512 by 768", "512", 512, "0x64", "-64x64", "64x")),
        *(({"size": value}, "size") for value in ("64x64x64", "64.5x64", "1e3x64", [64, 64], True, "٦٤x64")),
        *(({"width": value, "height": 64}, "width") for value in (0, -64, 64.5, "64.0px", True)),
        *(({"width": value, "height": 64}, "width") for value in (float("nan"), float("inf"), 10**400)),
        ({"width": 64, "height": "tall"}, "height"),
        ({"width": 64}, "width"),
        ({"height": 64, "width": ""}, "height"),
        ({"width": 64, "height": 96, "size": "96x64"}, "size"),
    ],
)
def test_what_is_no_size_is_refused_with_its_row(columns: dict[str, Any], column: str) -> None:
    with pytest.raises(InputError) as caught:
        read({}, {"size": "64x64"}, columns)
    assert caught.value.place == f"data.prompts: cats.csv, row 3, column {column}"
    assert caught.value.value is columns[column]
