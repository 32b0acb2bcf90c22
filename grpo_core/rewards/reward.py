"""A reward is a named, versioned function from finished samples to scores.

A reward sees a batch of samples and nothing of the training; the same samples give the same scores whatever the batch
or the order.
"""

import abc
import dataclasses
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from PIL import Image
from pydantic import ConfigDict, Field

from grpo_core.errors import InputError
from grpo_core.images import require_fit, to_rgb
from grpo_core.streams import Modality

STRICT = ConfigDict(strict=True, extra="forbid", validate_default=True, hide_input_in_errors=True)
"""For the settings of a reward, a pydantic dataclass: no value is converted, no secret is shown."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoringBatch:
    """Samples to score, one entry per sample in every field.

    Attributes:
        sample_ids: stable names of the samples.
        prompts: the prompt of each sample.
        images: the image of each sample (RGB, 8 bit); empty where samples are texts.
        targets: the target image that belongs to the sample's prompt, None where there is none; empty for texts.
        columns: every other column of the prompt file, by name, one value per sample.
        completions: the text of each sample; empty where samples are images.
        group_ids: the same for siblings; groups are complete and contiguous. Empty where groups are not known.
        token_ids: the tokens that each sample was decoded from; empty where they are not needed or not known.
        source_images: the images in each sample's prompt (RGB, 8 bit), in its order; empty where no prompt has any.
        starts: what the chat template wrote of each text before the model went on; empty where it wrote nothing.
    """

    sample_ids: Sequence[str]
    prompts: Sequence[str]
    images: Sequence[Image.Image] = ()
    targets: Sequence[Image.Image | None] = ()
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)
    completions: Sequence[str] = ()
    group_ids: Sequence[str] = ()
    token_ids: Sequence[Sequence[int]] = ()
    source_images: Sequence[Sequence[Image.Image]] = ()
    starts: Sequence[str] = ()

    def __post_init__(self) -> None:
        outputs = self.completions or self.images
        optional = (self.targets, self.group_ids, self.token_ids, self.source_images, self.starts)
        sizes = {len(self.prompts), len(outputs), *(len(values or outputs) for values in optional)}
        sizes |= {len(values) for values in self.columns.values()}
        assert sizes <= {len(self.sample_ids)}, f"one entry per sample in every field, got {sizes}"
        assert not (self.completions and self.images), "a sample is an image or a text"

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, rows: Sequence[int]) -> "ScoringBatch":
        """Return the samples with these indices, in this order."""
        chosen = {
            each.name: [values[row] for row in rows] if (values := getattr(self, each.name)) else ()
            for each in dataclasses.fields(self)
            if each.name != "columns"
        }
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        return ScoringBatch(**chosen, columns=columns)

    def groups(self, reward: str) -> list[list[int]]:
        """Return the indices of each group's samples; InputError, with the reward's name, without groups."""
        if len(self) and not self.group_ids:
            raise InputError(f"rewards.{reward}.by_group", True, "These samples come without groups. Set it to false.")
        rows = itertools.groupby(range(len(self)), key=lambda row: self.group_ids[row])
        return [list(group) for _, group in rows]

    def rgb_images(self, reward: str, min_side: int = 1, max_aspect: float = math.inf) -> Iterator[Image.Image]:
        """Yield each image in RGB; InputError, with the reward's name, for an unknown mode, too small or too long."""
        for sample_id, image in zip(self.sample_ids, self.images, strict=True):
            place = f"rewards.{reward}, sample {sample_id}"
            rgb = to_rgb(image, place)
            require_fit(rgb, place, reward, min_side, max_aspect)
            yield rgb


@dataclass(frozen=True)
class Score:
    """The score of one sample: a value, not applicable (no value, no failure) or a failure (no value, a reason).

    Attributes:
        value: in [0, 1] where the reward is bounded, higher is better; None where there is none.
        raw: the measured quantity in its own unit (dB, bytes, distance); None with value None.
        failure: why a sample to which the reward applies could not be scored; None where nothing went wrong.
        logged: metrics that the call which scored the sample reported, by name.
        extra: what the call reported about the sample, by column: numbers, texts and None.
    """

    value: float | None
    raw: float | None
    failure: str | None = None
    logged: Mapping[str, float] = field(default_factory=dict, compare=False)
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        assert self.value is None or self.failure is None, "a score or the reason why there is none"

    @classmethod
    def failed(cls, reason: str) -> "Score":
        """Return the score of a sample that could not be scored, for a reason other than the sample."""
        return cls(None, None, reason)

    @classmethod
    def of(cls, value: float, raw: float, reason: str | None = None) -> "Score":
        """Return value and raw, or a failure (`reason`, or the number itself) where raw is not finite.

        A NaN would leave a clamp as a value.
        """
        return cls(value, raw) if math.isfinite(raw) else cls.failed(reason or not_finite(raw))


class ScoringError(RuntimeError):
    """A service or an engine gave no score in this attempt; another one may succeed. The message has no address."""


NOT_APPLICABLE = Score(None, None)
"""The reward has nothing to say about the sample: no target, no quoted text."""


@dataclass(frozen=True)
class Needs:
    """What a reward scores, and what it needs of each sample.

    Attributes:
        media: what it scores.
        target: whether a sample without a target image has no score.
        column: of the prompt file, without which no sample has a score.
        group: whether a sample's score depends on its siblings, so that a batch must contain them all.
        tokens: that a sample was decoded from: None if it does not look at them, ``required`` if it cannot score an
            image of a pipeline that samples none.
        sources: the images in prompts, as `tokens`.
        source: which of them, from 0, a sample is compared with; None: with none.
        squeezes_reference: whether the image that a sample is compared with is squeezed to its size, and so needs its
            aspect ratio.
        min_side: smallest side of an image that it can score, in pixels.
        max_aspect: largest ratio of an image's long side to its short one.
    """

    media: tuple[Modality, ...] = ("image",)
    target: bool = False
    column: str | None = None
    group: bool = False
    tokens: Literal["optional", "required"] | None = None
    sources: Literal["optional", "required"] | None = None
    source: int | None = None
    squeezes_reference: bool = False
    min_side: int = 1
    max_aspect: float = math.inf


class Reward(abc.ABC):
    """A reward; its settings are fixed when it is built and named in its provenance.

    A subclass is a pydantic dataclass whose fields are its settings. A class attribute replaces each property that does
    not depend on the settings.
    """

    free_settings: ClassVar[frozenset[str]] = frozenset({"device"})
    """Settings that leave the scores alone: paths, devices, addresses."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The registered name."""

    @property
    @abc.abstractmethod
    def version(self) -> str:
        """Changes whenever the same sample would score otherwise."""

    @property
    def needs(self) -> Needs:
        """What it scores and needs, by its settings alone."""
        return Needs()

    def load_needs(self) -> Needs:
        """Return its needs with those of a user's function, which is imported; without them while it cannot load."""
        return self.needs

    @property
    def user_function(self) -> str | None:
        """Reference of the user's function that it calls, of whose answer nothing is known before a call; or None."""
        return None

    @property
    def unfollowed(self) -> Sequence[str]:
        """What the function's code uses and `version` does not see; empty while the function cannot load."""
        return ()

    def settings(self) -> Mapping[str, object]:
        """Return the settings that determine the scores, as plain JSON values."""
        names = (each.name for each in dataclasses.fields(self) if each.name not in self.free_settings)  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}

    def weight_digests(self) -> Mapping[str, str]:
        """Return the sha256 of every weight file that the scores come from, by role.

        Raises:
            InputError: a file is missing or has another digest.
        """
        return {}

    def preflight(self) -> Sequence[str]:
        """List what prevents scoring (missing weights, wrong digest), each with its hint. Loads no model."""
        return []

    def check_prompt(  # noqa: B027
        self, columns: Mapping[str, object], sizes: Sequence[tuple[int, int]], prompt: str = ""
    ) -> None:
        """Refuse a prompt whose data no sample could be scored with, before anything is sampled. Loads no model.

        Args:
            columns: the other columns of the prompt file.
            sizes: width and height of the images in the prompt, in pixels.
            prompt: itself, a text or the JSON of its messages.

        Raises:
            InputError: `place` is ``column <name>``, or what else of the prompt is wrong.
        """

    def __call__(
        self,
        outputs: Sequence[Image.Image] | Sequence[str],
        *,
        prompts: Sequence[str] | None = None,
        targets: Sequence[Image.Image | None] | None = None,
        group_ids: Sequence[str] | None = None,
        source_images: Sequence[Sequence[Image.Image]] | None = None,
        **columns: Sequence[object],
    ) -> list[Score]:
        """Score images or texts outside of a run: `build_reward("ssim")([image], targets=[target])`.

        Args:
            outputs: the images, or the texts.
            prompts: one per output; None for empty ones.
            targets: the target image of each output; None where there is none.
            group_ids: the same for siblings; None: all outputs are siblings.
            source_images: the images in the prompt of each output; None where there are none.
            columns: other columns of a prompt file, one value per output.

        Raises:
            InputError: an argument that the reward needs is missing, or has another length; as :meth:`score`.
        """
        given = {"prompts": prompts, "targets": targets, "group_ids": group_ids, "source_images": source_images}
        return score_samples(self, _loose_batch(self, outputs, given, columns))

    @abc.abstractmethod
    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Return one score per sample, in order; a sample's depends on no other sample except its siblings.

        The first call of a process loads what the reward needs.

        Raises:
            InputError: weights, packages, columns, tokens or groups that it needs are missing or wrong; an image of an
                unknown mode, or of a size that it cannot score; a service or function that breaks its contract.
        """


def _loose_batch(
    reward: Reward,
    outputs: Sequence[Image.Image] | Sequence[str],
    fields: Mapping[str, Sequence[Any] | None],
    columns: Mapping[str, Sequence[object]],
) -> ScoringBatch:
    """Return outputs that come from no run as a batch, with everything that the reward needs.

    Args:
        fields: of the batch, by name; None for those that are not given.
    """
    place, needs = f"rewards.{reward.name}", reward.load_needs()
    if isinstance(outputs, str | Image.Image):
        raise InputError(place, outputs, "Give a list of outputs, also for a single one.")
    images = [each for each in outputs if isinstance(each, Image.Image)]
    texts = [each for each in outputs if isinstance(each, str)]
    if len(outputs) not in (len(images), len(texts)):
        raise InputError(place, [type(each).__name__ for each in outputs], "Give PIL images only, or texts only.")
    if outputs and ("image" if images else "text") not in needs.media:
        raise InputError(place, type(outputs[0]).__name__, f"It scores {' or '.join(needs.media)}s.")
    if needs.target and fields["targets"] is None:
        raise InputError(f"{place}, targets", None, "It compares with target images: give one per output, or None.")
    if needs.column is not None and needs.column not in columns:
        hint = f"It reads this column of the prompts: give {needs.column}=[...] with one value per output."
        raise InputError(f"{place}, {needs.column}", None, hint)
    if needs.sources == "required" and fields["source_images"] is None:
        hint = "It looks at the images in prompts: give a list of them per output."
        raise InputError(f"{place}, source_images", None, hint)
    for name, values in {**fields, **columns}.items():
        if values is not None and len(values) != len(outputs):
            raise InputError(f"{place}, {name}", f"{len(values)} values", f"Give one per output: {len(outputs)}.")
    alike: dict[str, Any] = {"prompts": [""] * len(outputs), "group_ids": ["all"] * len(outputs)}
    return ScoringBatch(
        sample_ids=[f"output {number}" for number in range(len(outputs))],
        images=images,
        completions=texts,
        columns=columns,
        **alike | {name: values for name, values in fields.items() if values is not None},
    )


def score_samples(reward: Reward, batch: ScoringBatch) -> list[Score]:
    """Score a batch and check the answer: a value or raw quantity that is not finite becomes a logged failure.

    Raises:
        InputError: the reward returned another number of scores than there are samples.
    """
    scores = list(reward.score(batch)) if len(batch) else []
    if len(scores) != len(batch):
        hint = f"It got {len(batch)} samples; return one score per sample, in order."
        raise InputError(f"reward {reward.name}", f"{len(scores)} scores", hint)
    checked = [_finite(score) for score in scores]
    for sample_id, score in zip(batch.sample_ids, checked, strict=True):
        if score.failure is not None:
            _LOGGER.warning("reward %s, sample %s: %s", reward.name, sample_id, score.failure)
    return checked


def provenance_of(reward: Reward) -> dict[str, object]:
    """Describe where the reward's scores come from, as JSON values: equal provenance means equal scores.

    Returns:
        reward: its name; version: of its code; settings: those that determine the scores; settings_digest: their
        sha256; weights: sha256 of every weight file by role.

    Raises:
        InputError: a weight file is missing or has another digest.
    """
    settings: Mapping[str, object] = dict(reward.settings())
    canonical = json.dumps(settings, sort_keys=True, allow_nan=False)
    return {
        "reward": reward.name,
        "version": reward.version,
        "settings": settings,
        "settings_digest": hashlib.sha256(canonical.encode()).hexdigest(),
        "weights": dict(reward.weight_digests()),
    }


def problems_of(check: Callable[[], object]) -> list[str]:
    """Return the message of what a check refuses, for a preflight; empty if it passes."""
    try:
        check()
    except InputError as error:
        return [str(error)]
    return []


def clamp_unit(value: float) -> float:
    """Clamp a value to [0, 1]."""
    return min(max(value, 0.0), 1.0)


def not_finite(number: float) -> str:
    """Return the reason of a failure for NaN or infinity."""
    return f"the reward is {number}, not a finite number"


def _finite(score: Score) -> Score:
    broken = [number for number in (score.value, score.raw) if number is not None and not math.isfinite(number)]
    return Score.failed(not_finite(broken[0])) if broken else score
