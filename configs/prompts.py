"""The sections of a configuration about prompts: files and datasets, how they are drawn, and those held out."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from configs.validation import Name, OptionalText, Section
from grpo_core.errors import InputError
from grpo_core.rollouts.streams import MAX_PIXELS
from grpo_core.uses import Uses

_PROMPTS = (
    "a .txt, .jsonl, .json, .csv, .tsv or .parquet file, a folder of such files, or a dataset of the Hub: "
    "hf://datasets/owner/name or owner/name"
)


class _OnePromptFile(Section):
    keyless = frozenset({"streaming"})

    prompts: Annotated[str | None, Uses.PLACE] = Field(None, min_length=1, description=_PROMPTS)
    split: OptionalText = Field(None, description="of a dataset, such as train[:1000]; null: train")
    subset: OptionalText = Field(None, description="of a dataset with several; datasets calls it name")
    revision: OptionalText = Field(None, description="branch, tag or commit of the Hub; null: main")
    streaming: bool = Field(False, description="read a dataset's first rows, as many as limit, without downloading all")
    prompt_column: Annotated[str | dict[str, str] | None, Uses.NOTHING] = Field(
        None, description="null: found by its usual names; a column per role, {system: a, user: b}: messages"
    )
    columns: Annotated[tuple[str, ...] | None, Uses.NOTHING] = Field(
        None, description="the other columns that go along to the rewards; null: all but binary ones"
    )
    limit: PositiveInt | None = Field(None, description="use only the first prompts, this many")
    targets: Annotated[str | None, Uses.FOLDER] = Field(
        None, description="folder of target images, paired by index or by target_column"
    )
    target_column: Annotated[str | None, Uses.NOTHING] = Field(
        None, description="file name of each prompt's target image, relative to targets"
    )
    image_column: OptionalText = Field(
        None,
        description="images in the prompts, to edit or to look at; null: none, or of a vision model image and images",
    )
    max_image_pixels: int | None = Field(
        None, gt=0, le=MAX_PIXELS, description="largest width times height of an image in a prompt; null: 8192 x 8192"
    )
    height: PositiveInt | None = Field(None, description="of images whose row gives no size; null: the rollout's")
    width: PositiveInt | None = Field(None, description="of images whose row gives no size; null: the rollout's")


class DatasetSection(_OnePromptFile):
    """One prompt file among several."""

    name: Name = Field(description="stored with every rollout; rewards can be limited to datasets by name")
    prompts: Annotated[str, Uses.PLACE] = Field(min_length=1, description=_PROMPTS)
    weight: PositiveFloat = Field(1.0, description="share of the prompts on average, relative to the other datasets")

    @property
    def target_folder(self) -> str:
        """The folder of target images: that of the prompt file where none is named; empty is the working directory."""
        return self.prompts.rpartition("/")[0] if self.targets is None else self.targets


class PromptsSection(_OnePromptFile):
    """One prompt file, or several with names and weights."""

    datasets: tuple[DatasetSection, ...] = Field((), description="instead of the fields above")

    def contradictions(self) -> Iterator[InputError]:
        """Yield what belongs to one of several files, and names that several have."""
        for field in _OnePromptFile.model_fields if self.datasets else ():
            if (value := getattr(self, field)) not in (None, False):
                yield InputError(field, value, "With `datasets` it has no effect; move it into one of them.")
        for name, times in Counter(each.name for each in self.datasets).items():
            if times > 1:
                yield InputError("datasets", name, f"{times} datasets have this name; give each a different one.")

    @property
    def sets(self) -> tuple[DatasetSection, ...]:
        """The prompt files; a single file has the name `default`."""
        if self.datasets or self.prompts is None:
            return self.datasets
        return (DatasetSection(name="default", **{name: getattr(self, name) for name in _OnePromptFile.model_fields}),)

    def placed(self, place: str) -> Iterator[tuple[str, DatasetSection]]:
        """Yield each prompt file with its place in the configuration, given that of this section."""
        for index, dataset in enumerate(self.sets):
            yield f"{place}.datasets.{index}" if self.datasets else place, dataset


class CurriculumSection(Section):
    """How the prompts of an iteration are sampled."""

    kind: Literal["uniform", "difficulty"] = Field("uniform", description="every prompt equally often, or by reward")
    target: float = Field(0.5, description="mean group reward that teaches most; prompts near it are preferred")
    width: PositiveFloat = Field(0.25, description="how far from the target a prompt's mean still counts")
    floor: float = Field(0.1, gt=0, le=1, description="lowest weight of a prompt, relative to the highest")
    window: PositiveInt = Field(20, description="number of past iterations that count")


class DataSection(PromptsSection):
    """Training prompts, and their target images."""

    curriculum: CurriculumSection = CurriculumSection()

    def contradictions(self) -> Iterator[InputError]:
        """Yield those of prompt files, and that there is none."""
        yield from super().contradictions()
        if not self.sets:
            yield InputError("prompts", None, "Give a prompt file, or several as data.datasets.")


class EvaluateSection(PromptsSection):
    """Held-out prompts, sampled with fixed seeds before, during and after training."""

    share: float | None = Field(
        None, gt=0, lt=1, description="of data's prompts that is held out, instead of prompts of its own"
    )
    every: NonNegativeInt = Field(0, description="iterations between evaluations; 0: before and after only")
    samples_per_prompt: PositiveInt = Field(
        4, description="samples of each held-out prompt, always with the same seeds"
    )
    seed: NonNegativeInt = Field(0, description="of the held-out samples; the same for every training seed")
    num_inference_steps: PositiveInt | None = Field(
        None, description="of held-out images, all without noise; null: the rollout's"
    )
    guidance_scale: NonNegativeFloat | None = Field(None, description="of held-out images; null: the rollout's")
