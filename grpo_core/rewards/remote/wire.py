"""The protocol between a reward here and a scorer elsewhere: JSON over HTTP, images as PNG in base64.

docs/remote_rewards.md describes it for those who write a scorer.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from PIL import Image
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from grpo_core.errors import InputError
from grpo_core.rewards.scoring_batch import Score, ScoringBatch
from grpo_core.rollouts.images import encode_png, open_image, to_rgb
from grpo_core.rollouts.streams import MAX_PIXELS, Modality

PROTOCOL = 1
DESCRIBE_PATH = "/v1/describe"
SCORE_PATH = "/v1/score"
MAX_CELL_CHARACTERS = 100_000
"""Characters of a prompt, a completion or the value of a column, which is counted as JSON; ids of one sample."""

MAX_COLUMNS = 256
MAX_SOURCES = 64
"""Images in the prompt of one sample."""

_Text = Annotated[str, Field(max_length=MAX_CELL_CHARACTERS)]
_Name = Annotated[str, Field(min_length=1, max_length=1000)]
_PngText = Annotated[str, Field(max_length=4 * MAX_PIXELS)]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Answer(BaseModel):
    """An answer of a server; fields that a later server adds are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class RewardDescription(_Answer):
    """A reward of a server, by the properties of a Reward.

    `version` changes whenever the same sample would score otherwise, by code, settings or weights; `max_aspect` is None
    for any; `provenance` is anything about the origin of its scores.
    """

    name: _Name
    version: _Name
    media: list[Modality] = Field(min_length=1)
    needs_target: bool = False
    needs_group: bool = False
    needs_sources: bool = False
    needs_column: str | None = None
    min_side: int = 1
    max_aspect: float | None = Field(default=None, ge=1.0, allow_inf_nan=False)
    provenance: dict[str, object] = Field(default_factory=dict)


class Description(_Answer):
    """Answer of GET /v1/describe."""

    protocol: Literal[1]
    rewards: list[RewardDescription]


def _check_cell(value: object) -> object:
    if len(json.dumps(value, ensure_ascii=False)) > MAX_CELL_CHARACTERS:
        raise ValueError(f"a value has at most {MAX_CELL_CHARACTERS} characters")
    return value


class WireSample(_Message):
    """One sample; an image as base64 of a PNG file, or a text."""

    sample_id: _Name
    prompt: _Text
    group_id: str | None = None
    image: _PngText | None = None
    completion: _Text | None = None
    target: _PngText | None = None
    sources: list[_PngText] | None = Field(default=None, max_length=MAX_SOURCES)
    token_ids: list[int] | None = Field(default=None, max_length=MAX_CELL_CHARACTERS)
    columns: dict[_Name, Annotated[object, AfterValidator(_check_cell)]] = Field(
        default_factory=dict, max_length=MAX_COLUMNS
    )

    @model_validator(mode="after")
    def _one_output(self) -> "WireSample":
        if (self.image is None) == (self.completion is None):
            raise ValueError("a sample has an image or a completion, and not both")
        return self


class ScoreRequest(_Message):
    """Body of POST /v1/score; all samples are of one kind."""

    protocol: Literal[1]
    reward: _Name
    samples: list[WireSample] = Field(min_length=1, max_length=4096)

    @model_validator(mode="after")
    def _alike(self) -> "ScoreRequest":
        kinds = {(sample.image is None, sample.group_id is None, sample.token_ids is None) for sample in self.samples}
        names = {frozenset(sample.columns) for sample in self.samples}
        if len(kinds) > 1 or len(names) > 1:
            raise ValueError("the samples of one request have the same fields and columns")
        return self


class WireScore(_Answer):
    """One sample's score, null where the reward has nothing to say, or the reason of a failure."""

    sample_id: str
    value: float | None
    raw: float | None = None
    failure: str | None = None

    @model_validator(mode="after")
    def _either(self) -> "WireScore":
        if self.value is not None and self.failure is not None:
            raise ValueError("a score has a value or a failure, not both")
        return self


class ScoreAnswer(_Answer):
    """Answer of POST /v1/score: as many scores as samples, in their order."""

    protocol: Literal[1]
    reward: _Name
    version: _Name
    scores: list[WireScore]
    provenance: dict[str, object] = Field(default_factory=dict)


def write_request(reward: str, batch: ScoringBatch, *, with_targets: bool, with_sources: bool = False) -> bytes:
    """Write the body that requests these samples' scores; InputError for what JSON cannot express."""
    shown = replace(
        batch,
        targets=batch.targets if with_targets else (),
        source_images=batch.source_images if with_sources else (),
    )
    samples = [_wire_sample(shown, row) for row in range(len(batch))]
    try:
        content = {"protocol": PROTOCOL, "reward": reward, "samples": samples}
        return json.dumps(content, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise InputError(
            "columns of the prompt file", str(error), "Keep to texts, finite numbers and lists."
        ) from error


def _wire_sample(batch: ScoringBatch, row: int) -> dict[str, object]:
    sample_id = batch.sample_ids[row]
    sample: dict[str, object] = {"sample_id": sample_id, "prompt": batch.prompts[row]}
    if batch.images:
        sample["image"] = encode_image(batch.images[row], f"sample {sample_id}")
    else:
        sample["completion"] = batch.completions[row]
    target = batch.targets[row] if batch.targets else None
    if target is not None:
        sample["target"] = encode_image(target, f"target of sample {sample_id}")
    if batch.source_images and batch.source_images[row]:
        place = f"image in the prompt of sample {sample_id}"
        sample["sources"] = [encode_image(image, place) for image in batch.source_images[row]]
    if batch.group_ids:
        sample["group_id"] = batch.group_ids[row]
    if batch.token_ids:
        sample["token_ids"] = [int(token) for token in batch.token_ids[row]]
    return sample | {"columns": {name: values[row] for name, values in batch.columns.items()}}


def count_characters(request: ScoreRequest) -> int:
    """Add up the characters of all prompts, completions and columns of a request, and its token ids."""
    cells = [[s.prompt, s.completion, *s.columns.values()] for s in request.samples]
    texts = (cell if isinstance(cell, str) else json.dumps(cell) for row in cells for cell in row if cell is not None)
    return sum(map(len, texts)) + sum(len(s.token_ids or ()) for s in request.samples)


def declared_pixels(request: ScoreRequest) -> int:
    """Add up the pixels of all images of a request, from their headers: nothing is decoded."""
    texts = [
        (s, kind, text)
        for s in request.samples
        for kind, text in (("image", s.image), ("target", s.target), *(("sources", each) for each in s.sources or ()))
    ]
    images = [_open_png(text, f"sample {s.sample_id}, {kind}") for s, kind, text in texts if text is not None]
    return sum(image.width * image.height for image in images)


def read_batch(request: ScoreRequest) -> ScoringBatch:
    """Read the samples of a request and decode the images; InputError for one that is no PNG, or too large."""
    samples = request.samples
    named = [(f"sample {sample.sample_id}", sample) for sample in samples]
    return ScoringBatch(
        sample_ids=[sample.sample_id for sample in samples],
        prompts=[sample.prompt for sample in samples],
        images=[decode_image(s.image, f"{place}, image") for place, s in named if s.image is not None],
        targets=[None if s.target is None else decode_image(s.target, f"{place}, target") for place, s in named],
        source_images=_source_images(request),
        completions=[sample.completion for sample in samples if sample.completion is not None],
        columns={name: [sample.columns[name] for sample in samples] for name in samples[0].columns},
        group_ids=[sample.group_id for sample in samples if sample.group_id is not None],
        token_ids=[sample.token_ids for sample in samples if sample.token_ids is not None],
    )


def _source_images(request: ScoreRequest) -> Sequence[Sequence[Image.Image]]:
    if not any(sample.sources for sample in request.samples):
        return ()
    return [
        [decode_image(each, f"sample {sample.sample_id}, sources") for each in sample.sources or ()]
        for sample in request.samples
    ]


def read_scores(answer: ScoreAnswer, sample_ids: Sequence[str]) -> list[Score]:
    """Read the scores of an answer; ValueError for other samples than those requested."""
    if len(answer.scores) != len(sample_ids):
        raise ValueError(f"{len(answer.scores)} scores for {len(sample_ids)} samples")
    for given, requested in zip(answer.scores, sample_ids, strict=True):
        if given.sample_id != requested:
            raise ValueError(f"a score of sample {given.sample_id!r} where {requested!r} was expected")
    return [_read_score(given) for given in answer.scores]


def _read_score(given: WireScore) -> Score:
    if given.failure is not None:
        return Score.failed(given.failure)
    raw = given.value if given.raw is None or given.value is None else given.raw
    return Score(given.value, raw)


def write_answer(described: RewardDescription, sample_ids: Sequence[str], scores: Sequence[Score]) -> dict[str, object]:
    """Return the content of an answer to POST /v1/score."""
    pairs = zip(sample_ids, scores, strict=True)
    return {
        "protocol": PROTOCOL,
        "reward": described.name,
        "version": described.version,
        "scores": [{"sample_id": i, "value": s.value, "raw": s.raw, "failure": s.failure} for i, s in pairs],
        "provenance": described.provenance,
    }


def encode_image(image: Image.Image, place: str) -> str:
    """Encode the image as an RGB PNG file in base64, without loss; InputError for an unknown mode."""
    return base64.b64encode(encode_png(to_rgb(image, place))).decode()


def decode_image(text: str, place: str) -> Image.Image:
    """Decode a PNG file in base64, to RGB; InputError for anything else, or more than MAX_PIXELS."""
    return to_rgb(_open_png(text, place), place)


def _open_png(text: str, place: str) -> Image.Image:
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InputError(place, f"{text[:20]}...", "Send the PNG file in base64 (RFC 4648, no line breaks).") from error
    try:
        return open_image(content, place, ("PNG",))
    except InputError:
        raise
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(place, content[:8], f"Send a PNG file in base64 ({error}).") from error


def first_error(error: ValidationError) -> str:
    """Return where the first error of a message is, and what it is."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in found["loc"])
    return f"{where}: {found['msg']}" if where else str(found["msg"])
