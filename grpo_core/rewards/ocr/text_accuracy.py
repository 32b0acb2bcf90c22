"""Whether the image shows the text of its prompt, read by an OCR engine."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from PIL import Image
from pydantic import Field
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.rewards.ocr.engines import RapidEngine, TesseractEngine
from grpo_core.rewards.ocr.text_match import MATCHES, quoted_texts
from grpo_core.rewards.reward import STRICT, Needs, Reward, Text
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch, ScoringError
from grpo_core.uses import Uses

MAX_ASPECT = 8.0
"""Both engines enlarge the short side; an image of 4x2000 pixels keeps RapidOCR busy for minutes."""

LIMIT_SIDE_LEN = 320
"""Small images are read no better above it, and slower."""

MAX_SIDE_LEN = 768
"""Large images are read no better above it, their small print worse, and slower."""

LANGUAGES = "eng"

_PLACE = "rewards.text_accuracy"
_SETTINGS_OF_ENGINE: Mapping[str, tuple[str, ...]] = {
    "rapidocr": ("cls", "limit_side_len", "max_side_len"),
    "tesseract": ("languages",),
}


@dataclass(frozen=True, config=STRICT)
class TextAccuracyReward(Reward):
    """Value 1 for exactly the text, 0 for none of it; raw the errors: edits, in mode ``cvtg`` missing words.

    The texts are those between quotation marks in the prompt, or those of a column. A sample without one has no score.
    A setting of one engine is None with the other.

    Attributes:
        mode: ``ned`` (surplus text costs as much as missing text, and what the engine does not accept is surplus),
            ``flow_grpo`` or ``cvtg`` (it costs nothing).
        column: the prompt file's column with a sample's text or list of texts, instead of the quotes.
        engine: ``rapidocr`` (Chinese and English) or ``tesseract``.
        cls: rapidocr: whether upside-down lines are turned and read, which gives them full marks; False.
        limit_side_len: rapidocr: an image with a smaller short side is enlarged to it for finding the lines; 320.
        max_side_len: rapidocr: an image with a larger long side is shrunk to it before it is read; 768.
        languages: tesseract: names of its languages, joined by a plus (``eng+chi_sim``); ``eng``.
        attempts: how often an image is read at most when the engine breaks down; then the sample is a failure.
    """

    mode: Literal["ned", "flow_grpo", "cvtg"] = "ned"
    column: Annotated[Text | None, Uses.NOTHING] = None
    engine: Literal["rapidocr", "tesseract"] = "rapidocr"
    cls: bool | None = None
    limit_side_len: Annotated[int, Field(ge=32, le=4096)] | None = None
    max_side_len: Annotated[int, Field(ge=64, le=8192)] | None = None
    languages: Annotated[str, Field(pattern=r"^\w[\w/]*(\+\w[\w/]*)*$"), Uses.NOTHING] | None = None
    attempts: Annotated[int, Field(ge=1, le=100)] = 3

    name: ClassVar[str] = "text_accuracy"

    def __post_init__(self) -> None:
        for engine, settings in _SETTINGS_OF_ENGINE.items():
            for setting in settings if engine != self.engine else ():
                if getattr(self, setting) is not None:
                    hint = f"Only the engine {engine} has this setting. Leave it out."
                    raise InputError(f"{_PLACE}.{setting}", getattr(self, setting), hint)

    @property
    def version(self) -> str:
        """Includes the engine, because another one reads other text."""
        return f"4+{self._build_engine().version}"

    @property
    def needs(self) -> Needs:
        """The column of the texts, where they do not come from the prompt."""
        return Needs(column=self.column, max_aspect=MAX_ASPECT)

    def settings(self) -> Mapping[str, object]:
        """Return mode, column, engine and the settings of this engine."""
        shared = {"mode": self.mode, "column": self.column, "engine": self.engine}
        return {**shared, **self._engine_settings()}

    def weight_digests(self) -> Mapping[str, str]:
        """Return the digests of the engine's models."""
        return self._build_engine().model_digests()

    def preflight(self) -> Sequence[str]:
        """List what the engine lacks: a package, a program, a language, a model file."""
        return self._build_engine().find_problems()

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; the first call of a process loads the engine."""
        engine = self._build_engine()
        wanted = [self._find_texts(batch, row) for row in range(len(batch))]
        rows = [row for row, texts in enumerate(wanted) if texts]
        scores = [NOT_APPLICABLE] * len(batch)
        for row, image in zip(rows, batch.select(rows).rgb_images(self.name, max_aspect=MAX_ASPECT), strict=True):
            scores[row] = self._score_image(engine, image, wanted[row])
        return scores

    def _score_image(self, engine: RapidEngine | TesseractEngine, image: Image.Image, texts: Sequence[str]) -> Score:
        # Imported where it is used, as the engines are.
        import tenacity

        stop, again = tenacity.stop_after_attempt(self.attempts), tenacity.retry_if_exception_type(ScoringError)
        try:
            lines = tenacity.Retrying(stop=stop, retry=again, reraise=True)(engine.read, image)
        except ScoringError as error:
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

    def _build_engine(self) -> RapidEngine | TesseractEngine:
        if self.engine == "tesseract":
            return TesseractEngine(self.languages or LANGUAGES)
        return RapidEngine(bool(self.cls), self.limit_side_len or LIMIT_SIDE_LEN, self.max_side_len or MAX_SIDE_LEN)
