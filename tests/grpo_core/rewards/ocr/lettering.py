"""Images with writing in the fonts of Debian."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image, ImageDraw, ImageFont

_FOLDER = Path("/usr/share/fonts")
LATIN = tuple(
    _FOLDER / "truetype" / name
    for name in (
        "dejavu/DejaVuSans.ttf",
        "dejavu/DejaVuSans-Bold.ttf",
        "dejavu/DejaVuSerif.ttf",
        "dejavu/DejaVuSansMono.ttf",
        "liberation/LiberationSans-Regular.ttf",
        "liberation/LiberationSerif-Regular.ttf",
        "liberation/LiberationSans-Bold.ttf",
    )
)
CHINESE = (_FOLDER / "opentype/noto/NotoSansCJK-Regular.ttc", _FOLDER / "truetype/wqy/wqy-microhei.ttc")
COLOURS = (
    ("black", "white"),
    ("white", "black"),
    ("#5a1a00", "#f5e6c8"),
    ("#ffe070", "#103060"),
    ("white", "#c02020"),
    ("#204020", "#e0e0e0"),
)


def chinese_fonts() -> list[Path]:
    """The installed ones; the test is skipped where there are none."""
    found = [path for path in CHINESE if path.is_file()]
    if not found:
        pytest.skip("no Chinese font: apt-get install fonts-noto-cjk or fonts-wqy-microhei")
    return found


def draw(
    *lines: str, size: int = 256, font: Path = LATIN[0], colours: Sequence[str] = COLOURS[0], share: float = 0.85
) -> Image.Image:
    """A square with these lines in its middle, as large as fits into `share` of its width and height."""
    ink, paper = colours
    image = Image.new("RGB", (size, size), paper)
    pen = ImageDraw.Draw(image)
    hundred = ImageFont.truetype(str(font), 100)
    widest = max(pen.textlength(line, font=hundred) for line in lines) / 100
    points = int(share * size / max(widest, 1.25 * len(lines)))
    face, height = ImageFont.truetype(str(font), points), 1.25 * points * len(lines)
    for number, line in enumerate(lines):
        corner = ((size - pen.textlength(line, font=face)) / 2, (size - height) / 2 + 1.25 * points * number)
        pen.text(corner, line, font=face, fill=ink)
    return image
