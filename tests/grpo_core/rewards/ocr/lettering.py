"""Images with writing, in fonts that come with matplotlib and with these tests.

``DroidSansFallback-subset.ttf`` has the characters of `CHINESE_TEXTS` alone: Droid Sans Fallback, Copyright 2006 Google
Corp., Apache-2.0, cut with ``pyftsubset DroidSansFallbackFull.ttf --text=... --no-hinting``.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

_FOLDER = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
LATIN = tuple(
    _FOLDER / f"{name}.ttf"
    for name in (
        "DejaVuSans",
        "DejaVuSans-Bold",
        "DejaVuSerif",
        "DejaVuSansMono",
        "STIXGeneral",
        "DejaVuSerif-Bold",
        "STIXGeneralBol",
    )
)
CHINESE = Path(__file__).parent / "fonts" / "DroidSansFallback-subset.ttf"
CHINESE_TEXTS = ("开业大吉", "欢迎光临", "新年快乐", "北京大学", "禁止停车", "春夏秋冬", "生日快乐", "人工智能")
COLOURS = (
    ("black", "white"),
    ("white", "black"),
    ("#5a1a00", "#f5e6c8"),
    ("#ffe070", "#103060"),
    ("white", "#c02020"),
    ("#204020", "#e0e0e0"),
)


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
