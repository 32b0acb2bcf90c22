"""What trackers get of one iteration, read from the run's artifacts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from tasks.reports.iteration import IterationRecord
from tasks.reports.samples import Row, read_samples
from tasks.reports.text import in_cell, markdown_table, number, one_line
from tasks.runs.layout import ADVANTAGES, ADVANTAGES_FILE, ROLLOUTS, STATES
from tasks.runs.metrics_table import evaluation_metrics
from tasks.runs.run_view import EvaluationView
from tasks.storage.artifacts.reference import ArtifactRef, PrunedArtifactError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.advantages import leading_stream, read_advantages

MAX_PROMPTS, MAX_SAMPLES, MAX_SIDE = 16, 4, 512
"""Held-out prompts and samples of each that are logged, and the longest side of an image in pixels."""

TITLE_LETTERS, TEXT_LETTERS = 60, 2000

_COLUMNS = ("sample_id", "group_id", "prompt", "completion", "width", "height")


@dataclass(frozen=True)
class HeldoutPrompt:
    """A held-out prompt with its first samples.

    Attributes:
        title: its number and its beginning; the same at every evaluation.
        rewards: one for each sample; None for a sample without one.
        strip: the images side by side; None for texts and where they were pruned.
        texts: the completions; empty for images.
    """

    title: str
    prompt: str
    rewards: Sequence[float | None]
    strip: Image.Image | None
    texts: Sequence[str]

    @property
    def caption(self) -> str:
        """The prompt and the rewards of its samples."""
        return f"{self.prompt}\nreward {', '.join(map(number, self.rewards))}"


@dataclass(frozen=True)
class Step:
    """One iteration as trackers see it.

    Attributes:
        number: iterations done; 0 is the policy before training.
        metrics: as in metrics.parquet; before training the held-out ones alone.
        rewards: of all training samples that have one, by the first trained stream.
        heldout: the evaluation of the policy that the iteration made; empty without one.
    """

    number: int
    metrics: Mapping[str, float]
    rewards: Sequence[float]
    heldout: Sequence[HeldoutPrompt]

    @property
    def page(self) -> str:
        """The held-out prompts with the rewards of their samples, and each completion, as Markdown."""
        rows: list[list[str]] = []
        for each in self.heldout:
            prompt = in_cell(one_line(each.prompt, TEXT_LETTERS))
            if each.texts:
                texts = [in_cell(one_line(text, TEXT_LETTERS)) for text in each.texts]
                rows += [[prompt, number(reward), text] for reward, text in zip(each.rewards, texts, strict=True)]
            else:
                rows.append([prompt, ", ".join(map(number, each.rewards))])
        texts_too = any(each.texts for each in self.heldout)
        return "\n".join(markdown_table(["prompt", "reward", *(["completion"] if texts_too else [])], rows))


def read_step(
    store: ArtifactStore,
    number: int,
    record: IterationRecord | None,
    evaluation: EvaluationView | None,
) -> Step:
    """Read what is logged of an iteration.

    Args:
        record: None before training.
        evaluation: that of the policy that it made; None without one.
    """
    heldout = () if evaluation is None else _heldout(store, evaluation)
    if record is not None:
        return Step(number, record.metrics, _rewards(store, record.advantages), heldout)
    return Step(number, {} if evaluation is None else evaluation_metrics(evaluation), (), heldout)


def _rewards(store: ArtifactStore, advantages: ArtifactRef) -> Sequence[float]:
    with store.reading(without=STATES) as read:
        try:
            folder = read(advantages)
        except PrunedArtifactError:
            return ()
        rewards = leading_stream(read_advantages([folder / ADVANTAGES_FILE], ["reward"]))["reward"]
    known: list[float] = rewards.drop_null().to_pylist()
    return known


def _heldout(store: ArtifactStore, evaluation: EvaluationView) -> Sequence[HeldoutPrompt]:
    with store.reading(without=STATES) as read:
        try:
            table = read_samples(
                read,
                evaluation.stages[ROLLOUTS],
                (),
                evaluation.stages[ADVANTAGES],
                _COLUMNS,
            )
        except PrunedArtifactError:
            return ()
        groups = [group[:MAX_SAMPLES] for group in table.groups[:MAX_PROMPTS]]
        names = [] if table.is_text else [row["sample_id"] for group in groups for row in group]
        images = table.images(names, dict.fromkeys(names, MAX_SIDE))
    return [_prompt(index, group, images) for index, group in enumerate(groups, start=1)]


def _prompt(index: int, rows: Sequence[Row], images: Mapping[str, Image.Image]) -> HeldoutPrompt:
    prompt = rows[0]["prompt"]
    shown = [images[row["sample_id"]] for row in rows if row["sample_id"] in images]
    return HeldoutPrompt(
        # A slash would begin a group of its own.
        title=f"{index:02d} {one_line(prompt, TITLE_LETTERS).replace('/', ' ')}",
        prompt=prompt,
        rewards=[row["reward"] for row in rows],
        strip=_side_by_side(shown) if shown else None,
        texts=[row["completion"] for row in rows if "completion" in row],
    )


def _side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """Join the images of one prompt, which have one size."""
    width, height = images[0].size
    strip = Image.new("RGB", (width * len(images), height))
    for index, image in enumerate(images):
        strip.paste(image, (index * width, 0))
    return strip
