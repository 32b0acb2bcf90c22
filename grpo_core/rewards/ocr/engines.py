"""Engines that read text in images: RapidOCR with models from its wheel, and Tesseract, where it is installed.

The settings of an engine are fixed when it is built, so that no call changes another's result. It reads an 8-bit RGB
image to lines in reading order, none where nothing looks like text; a line that it sees and does not accept, upside
down, of low confidence or in a script that it does not know, is given as :func:`unread`.
"""

import base64
import functools
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

from grpo_core.errors import InputError
from grpo_core.rewards.ocr.lines import (
    FAR_SIDE,
    UNREAD,
    Line,
    Rectangle,
    count_letters,
    find_giant_writing,
    find_small_print,
    in_reading_order,
    unread,
)
from grpo_core.rewards.reward import problems_of
from grpo_core.rewards.scoring_batch import ScoringError
from grpo_core.seeds import file_sha256

MODELS: Mapping[str, str] = {
    "detection": "PP-OCRv6_det_small.onnx",
    "recognition": "PP-OCRv6_rec_small.onnx",
    "direction": "ch_ppocr_mobile_v2.0_cls_mobile.onnx",
}
"""The model files of the wheel by what they do."""

_PLACE = "rewards.text_accuracy.engine"
_HINT = "Install the published package again: pip install --force-reinstall --no-deps rapidocr==3.10.0"
_MIN_TEXT_SCORE = 0.5


@dataclass(frozen=True)
class RapidEngine:
    """Reads Chinese and English. Nothing is downloaded; one copy of the models per process and settings, one thread.

    Attributes:
        turn_lines: whether upside-down lines are turned and read; otherwise none is accepted. Without a change, many
            of them would be read.
        limit_side_len: an image with a smaller short side is enlarged to it for finding the lines.
        max_side_len: an image with a larger long side is shrunk to it before anything else.
    """

    turn_lines: bool
    limit_side_len: int
    max_side_len: int

    @property
    def version(self) -> str:
        """Includes both libraries: another ONNX Runtime computes other last digits."""
        return "+".join(f"{name}-{metadata.version(name)}" for name in ("rapidocr", "onnxruntime"))

    def model_digests(self) -> Mapping[str, str]:
        """Return the digests of the models; InputError for one that is missing, or not the one that was installed."""
        return {role: file_sha256(str(_find_model_file(name))) for role, name in MODELS.items()}

    def find_problems(self) -> Sequence[str]:
        """Report model files that are missing or changed."""
        return problems_of(self.model_digests)

    def read(self, image: Image.Image) -> tuple[str, ...]:
        """Read the lines; a confidence of a half or more is accepted, and lines turned a quarter, either way.

        Writing too large or small for the library comes last, not accepted. ScoringError if the library breaks down,
        InputError if a model file is missing or changed.
        """
        models = tuple(str(_find_model_file(name)) for name in MODELS.values())
        with _READING:
            reader = _load_reader(self, models)
            try:
                return self._read_all_sizes(reader, models, image)
            # Besides its own errors come those of OpenCV, NumPy and Shapely, which have no other base in common.
            except Exception as error:
                last_line = (str(error).strip().splitlines() or [""])[-1]
                raise ScoringError(f"rapidocr broke down over it ({type(error).__name__}: {last_line})") from error

    def _read_all_sizes(self, reader: Any, models: tuple[str, ...], image: Image.Image) -> tuple[str, ...]:
        """Read the lines in order, and after them, as not accepted, writing of a size that the library overlooks."""
        found = _find_lines(reader, image, self.turn_lines)
        lines = in_reading_order([line for line, _ in found])
        if all(UNREAD in line for line in lines):
            # None of the words is read, so nothing beside them matters.
            return lines
        known = [place for _, place in found]
        # The library would enlarge what has been shrunk.
        afar = _load_reader(replace(self, limit_side_len=FAR_SIDE // 2, max_side_len=FAR_SIDE), models)
        giant = find_giant_writing(image, known, lambda shrunk: _read_places(afar, shrunk))
        small = find_small_print(image, known, lambda part: _read_places(reader, part))
        return (*lines, *(unread(text) for text in (*giant, *small)))


def _read_places(reader: Any, image: Image.Image) -> list[tuple[str, Rectangle]]:
    return [(line.text, place) for line, place in _find_lines(reader, image, turn_lines=True)]


def _find_lines(reader: Any, image: Image.Image, turn_lines: bool) -> list[tuple[Line, Rectangle]]:
    """Read every box that the library finds; the library's own way through these steps drops what it doubts."""
    import numpy as np
    from rapidocr.main import RapidOCRError

    pixels, steps = reader.preprocess_img(reader.load_img(image))
    try:
        crops, found = reader.detect_and_crop(pixels, steps)
    except RapidOCRError:
        return []
    # The library turns tall boxes to the left.
    lying = [_is_tall(box) and crop.shape[0] < crop.shape[1] for box, crop in zip(found.boxes, crops, strict=True)]
    # The classifier alone also takes blurred upright lines for upside-down ones.
    labels = [label for label, _ in reader.cls_and_rotate(crops)[1].cls_res]
    doubtful = [row for row, label in enumerate(labels) if lying[row] or label == "180"]
    read = reader.recognize_txt([*crops, *(np.ascontiguousarray(np.rot90(crops[row], 2)) for row in doubtful)])
    readings = list(zip(read.txts, read.scores, strict=True))
    turned = dict(zip(doubtful, readings[len(crops) :], strict=True))
    lines = []
    for row, box in enumerate(found.boxes):
        turns = row in turned and _stands_turned(readings[row], turned[row], lying[row])
        text, score = turned[row] if turns else readings[row]
        accepted = score >= _MIN_TEXT_SCORE and (lying[row] or turn_lines or not turns)
        left, right = float(box[:, 0].min()), float(box[:, 0].max())
        top, bottom = float(box[:, 1].min()), float(box[:, 1].max())
        if not text.strip():
            # Letters of a script that the model does not know are read as spaces, with confidence.
            text, accepted = "?" * count_letters((left, top, right, bottom)), False
        line = Line(text if accepted else unread(text), left, top, bottom, falls=lying[row] and not turns)
        across, down = image.width / pixels.shape[1], image.height / pixels.shape[0]
        lines.append((line, (left * across, top * down, right * across, bottom * down)))
    return lines


def _is_tall(box: Any) -> bool:
    """Compare the sides of a box, whose corners begin at the upper left and go round by the upper right."""
    across, down = box[1] - box[0], box[3] - box[0]
    return bool(down @ down > across @ across)


def _stands_turned(upright: tuple[str, float], turned: tuple[str, float], lying: bool) -> bool:
    """Say which reading of a line, each with its confidence, is the right one; in doubt the first."""
    return turned[1] > upright[1] and (lying or not reads_both_ways(upright[0], turned[0]))


_TURNS = str.maketrans("6MWdpbqnu9mw", "9WMpdqbun6wm")
_ALIKE = str.maketrans("osxzlI0|", "OSXZ11O1")
_READ_BOTH_WAYS = frozenset("HINOSXZ18osxzl0|69MWmwdpbqnu ")


def reads_both_ways(upright: str, turned: str) -> bool:
    """Say whether two readings are of the same writing, upright and turned by half: NOON and NOON, up and dn.

    Only its surroundings could show which way it stands.
    """
    if not set(upright) <= _READ_BOTH_WAYS:
        return False
    back = turned[::-1].translate(_TURNS)
    return back.translate(_ALIKE) == upright.translate(_ALIKE)


_READING = threading.Lock()


@functools.lru_cache(maxsize=8)
def _load_reader(engine: RapidEngine, models: tuple[str, ...]) -> Any:
    # Imported where it is used: OpenCV and ONNX Runtime take longer than reading a configuration.
    from rapidocr import RapidOCR

    # Paths of the models, because the library looks for a download where it is left to find them itself.
    files = {f"{part}.model_path": path for part, path in zip(("Det", "Rec", "Cls"), models, strict=True)}
    return RapidOCR(
        params={
            **files,
            "Global.log_level": "error",
            "Global.text_score": _MIN_TEXT_SCORE,
            "Global.use_cls": True,
            "Global.max_side_len": engine.max_side_len,
            "Det.limit_side_len": engine.limit_side_len,
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )


@functools.lru_cache(maxsize=len(MODELS))
def _find_model_file(name: str) -> Path:
    listed = [entry for entry in metadata.files("rapidocr") or () if entry.name == name]
    path = Path(str(listed[0].locate())) if listed else None
    if path is None or not path.is_file():
        raise InputError(_PLACE, "rapidocr", f"Its model file {name} is missing. {_HINT}")
    recorded = listed[0].hash
    if recorded is not None:
        expected = base64.urlsafe_b64decode(recorded.value + "=" * (-len(recorded.value) % 4)).hex()
        if file_sha256(str(path)) != expected:
            raise InputError(_PLACE, "rapidocr", f"Its model file {path} is not the one installed. {_HINT}")
    return path


TIMEOUT_SECONDS = 60
"""After which an image is given up; Tesseract takes about a tenth of a second for one."""

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
        return problems + problems_of(self.model_digests)

    def read(self, image: Image.Image) -> tuple[str, ...]:
        """Read the lines, of each the words with a confidence of a half or more; at most TIMEOUT_SECONDS.

        Nothing is turned. ScoringError if the program breaks down or is late, InputError if something is not installed.
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
            raise ScoringError(f"tesseract broke down over it ({type(error).__name__}: {error})") from error
        return in_reading_order(_join_words(words))

    def _languages(self) -> tuple[str, ...]:
        return tuple(self.languages.split("+"))


def _join_words(words: Mapping[str, Sequence[Any]]) -> list[Line]:
    """Join Tesseract's table of words, which has a list for each column, to lines."""
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
    heading, *names = _ask("--list-langs").splitlines() or [""]
    folder = re.search(r'"(.*)"', heading)
    return Path(folder[1] if folder else "."), tuple(name.strip() for name in names if name.strip())


def _ask(question: str) -> str:
    """Return what the program prints; InputError where it is not installed, or fails."""
    try:
        return subprocess.run(["tesseract", question], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(_PLACE, "tesseract", f"The program cannot be run ({error}). {_BINARY_HINT}") from error
