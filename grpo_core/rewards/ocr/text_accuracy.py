"""Whether the image shows the text that its prompt asks for, read by an OCR engine."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from PIL import Image

from grpo_core.errors import InputError
from grpo_core.rewards.images import shown_size, to_rgb
from grpo_core.rewards.ocr.engine import Engine, ReadingError
from grpo_core.rewards.ocr.quoted_text import quoted_texts
from grpo_core.rewards.ocr.rapid import RapidEngine
from grpo_core.rewards.ocr.tesseract import TesseractEngine
from grpo_core.rewards.ocr.text_match import MATCHES
from grpo_core.rewards.protocol import NOT_APPLICABLE, Reward, Score, ScoringBatch
from grpo_core.rewards.settings import check_choice, check_integer

MAX_ASPECT = 8.0
"""Both engines enlarge the short side; an image of 4x2000 pixels keeps RapidOCR busy for minutes."""

LIMIT_SIDE_LEN = 320
"""Small images are read no better above it, and slower."""

MAX_SIDE_LEN = 768
"""Large images are read no better above it, their small print worse, and slower."""

LANGUAGES = "eng"
_LANGUAGES = r"\w[\w/]*(\+\w[\w/]*)*"

_PLACE = "rewards.text_accuracy"
_SETTINGS_OF_ENGINE: Mapping[str, tuple[str, ...]] = {
    "rapidocr": ("cls", "limit_side_len", "max_side_len"),
    "tesseract": ("languages",),
}


@dataclass(frozen=True)
class TextAccuracyReward(Reward):
    """Value 1 for the very text, 0 for nothing of it; raw the errors: edits, in mode ``cvtg`` missing words.

    The texts are those between quotation marks in the prompt, or those of a column. A sample without one has no score.
    A setting of one engine is None with the other.

    Attributes:
        mode: ``ned`` (surplus text costs as much as missing text), ``flow_grpo`` or ``cvtg`` (it costs nothing).
        column: the prompt file's column that holds a sample's text or list of texts, in place of the quotes; a sample
            that has null or no text there has no score.
        engine: ``rapidocr`` (Chinese and English) or ``tesseract``.
        cls: rapidocr: whether lines that stand on their head are turned and read, which gives them full marks, or
            passed over; False.
        limit_side_len: rapidocr: an image with a smaller short side is enlarged to it for finding the lines; 320.
        max_side_len: rapidocr: an image with a larger long side is shrunk to it before it is read; 768.
        languages: tesseract: names of its languages, joined by a plus (``eng+chi_sim``); ``eng``.
        attempts: how often an image is read at most when the engine breaks down; then the sample has failed.
    """

    mode: str = "ned"
    column: str | None = None
    engine: str = "rapidocr"
    cls: bool | None = None
    limit_side_len: int | None = None
    max_side_len: int | None = None
    languages: str | None = None
    attempts: int = 3

    name: ClassVar[str] = "text_accuracy"
    max_aspect: ClassVar[float] = MAX_ASPECT

    def __post_init__(self) -> None:
        check_choice(f"{_PLACE}.mode", self.mode, tuple(MATCHES))
        check_choice(f"{_PLACE}.engine", self.engine, tuple(_SETTINGS_OF_ENGINE))
        if self.column is not None and (not isinstance(self.column, str) or not self.column):
            raise InputError(f"{_PLACE}.column", self.column, "Give the name of a column, as text.")
        check_integer(f"{_PLACE}.attempts", self.attempts, 1, 100)
        self._check_engine_settings()

    def _check_engine_settings(self) -> None:
        for engine, settings in _SETTINGS_OF_ENGINE.items():
            for setting in settings if engine != self.engine else ():
                if getattr(self, setting) is None:
                    continue
                hint = f"Only the engine {engine} has this setting. Leave it out."
                raise InputError(f"{_PLACE}.{setting}", getattr(self, setting), hint)
        if self.cls is not None and not isinstance(self.cls, bool):
            raise InputError(f"{_PLACE}.cls", self.cls, "Set true or false.")
        if self.limit_side_len is not None:
            check_integer(f"{_PLACE}.limit_side_len", self.limit_side_len, 32, 4096)
        if self.max_side_len is not None:
            check_integer(f"{_PLACE}.max_side_len", self.max_side_len, 64, 8192)
        known = isinstance(self.languages, str | None) and re.fullmatch(_LANGUAGES, self.languages or LANGUAGES)
        if not known:
            hint = "Give Tesseract's names of languages, joined by a plus, such as eng+chi_sim."
            raise InputError(f"{_PLACE}.languages", self.languages, hint)

    @property
    def version(self) -> str:
        """The engine belongs to it: another one reads otherwise.

        Raises:
            InputError: the engine is not installed.
        """
        return f"2+{self._build_engine().version}"

    @property
    def needs_column(self) -> str | None:
        """The texts', where they do not come from the prompt."""
        return self.column

    def settings(self) -> Mapping[str, object]:
        """Everything but the number of attempts; of the engines' settings those of the one that reads."""
        shared = {"mode": self.mode, "column": self.column, "engine": self.engine}
        return {**shared, **self._engine_settings()}

    def weight_digests(self) -> Mapping[str, str]:
        """Those of the engine's models.

        Raises:
            InputError: the engine is not installed, or not the whole of it.
        """
        return self._build_engine().model_digests()

    def preflight(self) -> Sequence[str]:
        """What the engine lacks: a package, a program, a language, a model file."""
        return self._build_engine().find_problems()

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample; the first call of a process loads the engine.

        Raises:
            InputError: an image of an unknown mode or too long for its width, a column that holds no text; the engine
                is not installed.
        """
        engine = self._build_engine()
        wanted = [self._find_texts(batch, row) for row in range(len(batch))]
        rows = zip(batch.sample_ids, batch.images, wanted, strict=True)
        return [self._score_image(engine, i, image, texts) if texts else NOT_APPLICABLE for i, image, texts in rows]

    def _score_image(self, engine: Engine, sample_id: str, image: Image.Image, texts: Sequence[str]) -> Score:
        image = to_rgb(image, f"{_PLACE}, sample {sample_id}")
        if max(image.size) > MAX_ASPECT * min(image.size):
            hint = f"Generate images whose long side is at most {MAX_ASPECT:g} times the short one."
            raise InputError(f"{_PLACE}, sample {sample_id}", f"{shown_size(image)} pixels", hint)
        try:
            lines = read_with_retries(engine, image, self.attempts)
        except ReadingError as error:
            return Score.failed(f"{error}, in {self.attempts} attempt(s)")
        match = MATCHES[self.mode](texts, lines)
        return Score(match.value, float(match.errors))

    def _find_texts(self, batch: ScoringBatch, row: int) -> tuple[str, ...]:
        if self.column is None:
            return quoted_texts(batch.prompts[row])
        given = batch.columns.get(self.column, [None] * len(batch))[row]
        texts = [] if given is None else [given] if isinstance(given, str) else given
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            place = f"{_PLACE}, sample {batch.sample_ids[row]}, column {self.column}"
            raise InputError(place, given, "Write a text, or a list of texts, each in quotes.")
        return tuple(text.strip() for text in texts if text.strip())

    def _engine_settings(self) -> Mapping[str, object]:
        if self.engine == "tesseract":
            return {"languages": self.languages or LANGUAGES}
        limit, most = self.limit_side_len or LIMIT_SIDE_LEN, self.max_side_len or MAX_SIDE_LEN
        return {"cls": bool(self.cls), "limit_side_len": limit, "max_side_len": most}

    def _build_engine(self) -> Engine:
        if self.engine == "tesseract":
            return TesseractEngine(self.languages or LANGUAGES)
        return RapidEngine(bool(self.cls), self.limit_side_len or LIMIT_SIDE_LEN, self.max_side_len or MAX_SIDE_LEN)


def read_with_retries(engine: Engine, image: Image.Image, attempts: int) -> tuple[str, ...]:
    """The lines of an RGB image, read again when the engine breaks down, `attempts` times at most.

    Raises:
        ReadingError: it broke down every time.
        InputError: the engine is not installed.
    """
    # Imported where it is used, as the engines are.
    import tenacity

    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        retry=tenacity.retry_if_exception_type(ReadingError),
        reraise=True,
    )
    return retrying(engine.read, image)
