"""Text of any script in images: the fonts of this machine that have its letters, its lines, and their pixels.

Matplotlib brings DejaVu Sans, which has Latin, Greek, Cyrillic, Arabic, Hebrew and many symbols, finds the fonts of the
system for everything else, and lays out lines: joined letters, marks, and the order of right-to-left scripts. A letter
that no font has is written as its code point.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import regex
from matplotlib.font_manager import findSystemFonts, get_font
from matplotlib.ft2font import FT2Font
from PIL import Image

DEJAVU = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"

FONTS_HINT = (
    "Install fonts that have them, such as Noto (`apt install fonts-noto-core fonts-noto-cjk`), or copy a font file to "
    "~/.local/share/fonts."
)

_STYLES = re.compile(r"bold|italic|oblique|light|thin|black|medium|condensed|serif|mono", re.IGNORECASE)
_WIDE = r"[\p{EA=W}\p{EA=F}]"
_PIECES = regex.compile(rf"(\s*)((?={_WIDE})\X|(?:(?!{_WIDE}|\s)\X)+)")
"""What a line may be folded between, with the space before it: words, and wide letters such as Chinese ones in them."""

_JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
_ELLIPSIS = "…"
_DOTS_PER_INCH = 72  # so that a size in points is one in pixels


@dataclass(frozen=True)
class Fonts:
    """Fonts that together have the letters of some texts, of each letter the first; `missing` letters none has."""

    paths: tuple[str, ...]
    missing: frozenset[str]

    @property
    def missing_scripts(self) -> str:
        """Names of the scripts of the missing letters, sorted; empty if there are none but controls."""
        return ", ".join(sorted({_script(letter) for letter in self.missing if _is_drawn(letter)}))

    def shown(self, text: str) -> str:
        """Return a text with the code points of letters that have no glyph, in brackets."""
        if not self.missing:
            return text
        runs = re.compile(f"[{re.escape(''.join(sorted(self.missing)))}]+")
        return runs.sub(lambda run: f"[{' '.join(f'U+{ord(letter):04X}' for letter in run[0])}]", text)

    def lines(self, text: str, size: int, width: int, count: int) -> list[str]:
        """Fold a text into lines for `draw`, at spaces, between wide letters and in long words; cut after `count`."""
        lines = [""]
        for space, piece in _PIECES.findall(self.shown(text)):
            longer = f"{lines[-1]}{space and ' '}{piece}".lstrip()
            if self.width(longer, size) <= width:
                lines[-1] = longer
                continue
            if lines[-1]:
                lines.append("")
            for cluster in regex.findall(r"\X", piece):
                if lines[-1] and self.width(lines[-1] + cluster, size) > width:
                    lines.append("")
                lines[-1] += cluster
        if len(lines) <= count:
            return lines
        clusters = regex.findall(r"\X", lines[count - 1])
        while clusters and self.width(f"{''.join(clusters)} {_ELLIPSIS}", size) > width:
            clusters.pop()
        return [*lines[: count - 1], f"{''.join(clusters)} {_ELLIPSIS}"]

    def draw(self, image: Image.Image, corner: tuple[int, int], line: str, size: int, colour: str) -> None:
        """Draw a line, as `lines` and `shown` return it, from its left end and baseline, in a colour of Pillow's."""
        font = self._laid_out(line, size)
        font.draw_glyphs_to_bitmap(antialiased=True)
        pixels = np.asarray(font.get_image())
        if pixels.size:
            left, baseline = corner
            below = math.ceil(font.get_descent() / 64)
            image.paste(colour, (left, baseline + below - pixels.shape[0]), Image.fromarray(pixels))

    def width(self, line: str, size: int) -> int:
        """Return the width of a line in pixels, rounded up."""
        return math.ceil(self._laid_out(line, size).get_width_height()[0] / 64)

    def _laid_out(self, line: str, size: int) -> FT2Font:
        font = get_font(self.paths)
        font.set_size(size, _DOTS_PER_INCH)
        font.set_text(line)
        return font


def fonts_for(texts: Iterable[str], system: Sequence[str] | None = None) -> Fonts:
    """Choose fonts for texts: DejaVu Sans, and fonts of the system, or these, for letters that it does not have."""
    letters = {letter for text in texts for letter in text if not letter.isspace()}
    paths = [str(DEJAVU)]
    missing = {letter for letter in letters if not _is_drawn(letter)}
    wanted = letters - missing - _letters_of(str(DEJAVU))
    for path in sorted(findSystemFonts() if system is None else system, key=_preference) if wanted else ():
        if found := wanted & _letters_of(path):
            paths.append(path)
            wanted -= found
        if not wanted:
            break
    return Fonts(tuple(paths), frozenset(missing | wanted))


def _letters_of(path: str) -> set[str]:
    """Return the letters that a font can draw; none of one that cannot be read, or whose glyphs are pictures."""
    try:
        font = FT2Font(path)
    except (OSError, RuntimeError):
        return set()
    coloured = "emoji" in font.family_name.lower() and "color" in font.family_name.lower()
    return set(map(chr, font.get_charmap())) if font.scalable and not coloured else set()


def _is_drawn(letter: str) -> bool:
    """Whether a letter is drawn where a font has it; controls are not, such as those that turn the order of letters."""
    return letter.isprintable() or letter in _JOINERS


def _preference(path: str) -> tuple[int, bool, str, str]:
    """Order fonts: upright ones of regular weight first, and of these Noto, so that the choice is always the same."""
    name = Path(path).name
    return len(_STYLES.findall(name)), not name.startswith("Noto"), name, path


def _script(letter: str) -> str:
    """Return the script of a letter: the first word of its name."""
    if not unicodedata.category(letter).startswith(("L", "M")):
        return "symbols"
    script = unicodedata.name(letter, "unnamed").partition(" ")[0]
    return script if script == "CJK" else script.capitalize()
