"""Read with Tesseract: a second engine, to distinguish better writing from writing that suits the first."""

import functools
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

from grpo_core.digests import file_sha256
from grpo_core.errors import InputError
from grpo_core.rewards.ocr.protocol import Line, ReadingError, in_reading_order, unread

TIMEOUT_SECONDS = 60
"""After which an image is given up; Tesseract takes about a tenth of a second for one."""

_PLACE = "rewards.text_accuracy.engine"
_NO_PACKAGE = "The package pytesseract is missing. Install it: pip install 'grpo-staged[tesseract]', or set rapidocr."
_BINARY_HINT = "Install Tesseract (Debian: apt-get install tesseract-ocr), or set rapidocr."
# Sparse text: an image is no page, and the analysis of a page's layout takes writing in a scene for an illustration.
_CONFIG = "--psm 11"
_MIN_CONFIDENCE = 50


@dataclass(frozen=True)
class TesseractEngine:
    """Reads the languages that are installed with it, each image in a separate process.

    Tesseract computes with as many threads as the environment variable OMP_THREAD_LIMIT allows.

    Attributes:
        languages: Tesseract's names, joined by a plus: ``eng``, ``eng+chi_sim``.
    """

    languages: str

    @property
    def version(self) -> str:
        """Return the version of the program."""
        return f"tesseract-{_ask_version()}"

    def model_digests(self) -> Mapping[str, str]:
        """Return the digests of the languages' data."""
        folder, installed = _ask_languages()
        for language in self._languages():
            if language not in installed:
                hint = (
                    f"Tesseract has {', '.join(installed) or 'no languages'} in {folder}. Install this one (Debian: "
                    f"apt-get install tesseract-ocr-{language.replace('_', '-')}), or set others."
                )
                raise InputError("rewards.text_accuracy.languages", language, hint)
        return {language: file_sha256(str(folder / f"{language}.traineddata")) for language in self._languages()}

    def find_problems(self) -> Sequence[str]:
        """Report the Python package, the program or a language that is not installed."""
        missing = find_spec("pytesseract") is None
        problems = [str(InputError(_PLACE, "tesseract", _NO_PACKAGE))] if missing else []
        try:
            self.model_digests()
        except InputError as error:
            problems.append(str(error))
        return problems

    def read(self, image: Image.Image) -> tuple[str, ...]:
        """Read the lines, of each the words with a confidence of a half or more; at most TIMEOUT_SECONDS.

        Nothing is turned: writing on its head or on its side is unread, where it is seen at all.
        """
        try:
            import pytesseract
        except ImportError as error:
            raise InputError(_PLACE, "tesseract", _NO_PACKAGE) from error
        # The package hands the image over in the format of the file it came from, which may be a lossy one.
        bare = Image.frombytes("RGB", image.size, image.tobytes())
        try:
            words = pytesseract.image_to_data(
                bare, lang=self.languages, config=_CONFIG, timeout=TIMEOUT_SECONDS, output_type=pytesseract.Output.DICT
            )
        except pytesseract.TesseractNotFoundError as error:
            raise InputError(_PLACE, "tesseract", f"The program is not installed. {_BINARY_HINT}") from error
        # The package raises RuntimeErrors where the program fails or is late, OSErrors where it cannot be started.
        except (RuntimeError, OSError) as error:
            self.model_digests()
            raise ReadingError(f"tesseract broke down over it ({type(error).__name__}: {error})") from error
        return in_reading_order(_join_words(words))

    def _languages(self) -> tuple[str, ...]:
        return tuple(self.languages.split("+"))


def _join_words(words: Mapping[str, Sequence[Any]]) -> list[Line]:
    """Tesseract's lines out of its table of words, which has a list for each column."""
    lines: dict[tuple[int, int, int], Line] = {}
    for row, text in enumerate(words["text"]):
        if not text.strip():
            continue
        text = text.strip() if words["conf"][row] >= _MIN_CONFIDENCE else unread(text)
        left, top = words["left"][row], words["top"][row]
        word = Line(text, left, top, top + words["height"][row])
        place = words["block_num"][row], words["par_num"][row], words["line_num"][row]
        lines[place] = _append(lines[place], word) if place in lines else word
    return list(lines.values())


def _append(line: Line, word: Line) -> Line:
    edges = min(line.left, word.left), min(line.top, word.top), max(line.bottom, word.bottom)
    return Line(f"{line.text} {word.text}", *edges)


@functools.cache
def _ask_version() -> str:
    match = re.match(r"tesseract v?(\S+)", _ask("--version"))
    return match[1] if match else "unknown"


@functools.cache
def _ask_languages() -> tuple[Path, tuple[str, ...]]:
    """The folder of the languages' data and the names of the languages in it."""
    heading, *names = _ask("--list-langs").splitlines() or [""]
    folder = re.search(r'"(.*)"', heading)
    return Path(folder[1] if folder else "."), tuple(name.strip() for name in names if name.strip())


def _ask(question: str) -> str:
    """Return what the program prints; InputError where it is not installed, or fails."""
    try:
        return subprocess.run(["tesseract", question], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(_PLACE, "tesseract", f"The program cannot be run ({error}). {_BINARY_HINT}") from error
