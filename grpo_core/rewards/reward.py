"""A reward is a named, versioned function from finished samples to scores, whatever their batch or order."""

import abc
import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from PIL import Image
from pydantic import ConfigDict, Field

from grpo_core.errors import InputError
from grpo_core.rewards.scoring_batch import Score, ScoringBatch, not_finite
from grpo_core.rollouts.streams import Modality

STRICT = ConfigDict(strict=True, extra="forbid", validate_default=True, hide_input_in_errors=True)
"""For the settings of a reward, a pydantic dataclass: no value is converted, no secret is shown."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]

_LOGGER = logging.getLogger(__name__)


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
        squeezes_reference: whether the image that a sample is compared with is squeezed to its size.
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
    """A reward: a pydantic dataclass whose fields are its settings, fixed when it is built and named in its provenance.

    A class attribute replaces each property that does not depend on the settings.
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
        """Return the sha256 of every weight file that the scores come from, by role; InputError for a wrong one."""
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
            prompt: a text or the JSON of its messages.

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

        Every argument has one value per output; columns are those of a prompt file. Without group_ids all outputs are
        siblings. InputError if one that the reward needs is missing, or has another length; as :meth:`score`.
        """
        given = {"prompts": prompts, "targets": targets, "group_ids": group_ids, "source_images": source_images}
        return score_samples(self, _loose_batch(self, outputs, given, columns))

    @abc.abstractmethod
    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Return one score per sample, in order; a sample's depends on no other sample except its siblings.

        The first call of a process loads what the reward needs. InputError for anything that is missing or wrong, and
        for an image of a mode or size that it cannot score.
        """


def _loose_batch(
    reward: Reward,
    outputs: Sequence[Image.Image] | Sequence[str],
    fields: Mapping[str, Sequence[Any] | None],
    columns: Mapping[str, Sequence[object]],
) -> ScoringBatch:
    """Return outputs that come from no run as a batch, with everything that the reward needs, or raise InputError."""
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

    InputError if the reward returned another number of scores than there are samples.
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
    """Describe where the reward's scores come from, as JSON values: equal provenance means equal scores."""
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


def _finite(score: Score) -> Score:
    broken = [number for number in (score.value, score.raw) if number is not None and not math.isfinite(number)]
    return Score.failed(not_finite(broken[0])) if broken else score
