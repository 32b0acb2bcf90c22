"""Checks of prompts, targets and image sizes."""

import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from configs.prompts import DatasetSection
from configs.rollouts import ImageRolloutSection
from configs.schema import RunConfig
from grpo_core.errors import InputError
from grpo_core.policies.protocol import policy_family
from grpo_core.rollouts.messages import answer_begun
from grpo_core.rollouts.streams import MAX_PIXELS, ImageSize
from tasks.prompts.curriculum import PromptSet
from tasks.prompts.hub_datasets import DatasetChoice
from tasks.prompts.read import LONG_PROMPT, Prompt, PromptFile, read_prompts
from tasks.prompts.source_images import SourceColumns
from tasks.prompts.targets import pair_targets, read_sizes, size_place
from tasks.reports.text import counted, one_line, printable

MAX_PROBLEMS = 5
"""Maximum number of sizes that are reported at once; a file may have another one in each row."""

_SHOWN_LETTERS = 60


@dataclass(frozen=True)
class PromptFiles:
    """The prompt files of a configuration, each read once.

    Attributes:
        sets: the prompt sets of each section, one entry per dataset; None where its file or a target cannot be used.
        problems: why sets cannot be used.
        notes: what a person should know about sets that can be used.
    """

    sets: Mapping[str, tuple[PromptSet | None, ...]]
    problems: tuple[InputError, ...]
    notes: tuple[str, ...]

    def usable(self, section: str) -> tuple[PromptSet, ...]:
        """The sets of a section that could be read."""
        return tuple(each for each in self.sets[section] if each is not None)

    @property
    def by_size(self) -> Counter[ImageSize]:
        """How many prompts are for images of each size."""
        return Counter(size for section in ("data", "evaluate") for each in self.usable(section) for size in each.sizes)


def check_prompts(config: RunConfig, prompts: PromptFiles) -> Iterator[InputError]:
    """Report files and targets that cannot be used."""
    yield from prompts.problems


def read_prompt_files(config: RunConfig) -> PromptFiles:
    """Read the training and held-out prompts with their targets; a later rescoring may need those."""
    sets: dict[str, tuple[PromptSet | None, ...]] = {}
    problems: list[InputError] = []
    notes: list[str] = []
    known: list[tuple[DatasetSection, tuple[PromptFile, PromptSet]]] = []
    for name, section in config.prompt_sections.items():
        read: list[PromptSet | None] = []
        for own, dataset in section.placed(name):
            same = (found for given, found in known if given == dataset)
            try:
                file, prompts = next(same, None) or _read_prompt_set(config, dataset)
            except InputError as error:
                problems.append(InputError(error.place.replace("data.", f"{own}.", 1), error.value, error.hint))
                read.append(None)
                continue
            known.append((dataset, (file, prompts)))
            read.append(prompts)
            notes += [f"{own}.prompts: {dataset.prompts}: {note}" for note in _notes(dataset, file, prompts)]
            if pairs := _first_and_last_pair(prompts):
                notes.append(f"{own}.targets: {pairs}")
        sets[name] = tuple(read)
    if config.evaluate.share is not None:
        sets = _with_share(sets, config.evaluate.share, problems)
    notes += _overlap(sets)
    return PromptFiles(sets, tuple(problems), tuple(notes))


def _with_share(
    sets: Mapping[str, tuple[PromptSet | None, ...]], share: float, problems: list[InputError]
) -> dict[str, tuple[PromptSet | None, ...]]:
    """Divide the prompts of each file between the sections; a problem for one with a single prompt."""
    divided: dict[str, tuple[PromptSet | None, ...]] = {}
    for name, read in sets.items():
        parts: list[PromptSet | None] = []
        for each in read:
            held = frozenset[int]() if each is None else each.held_out(share)
            if each is None or len(held) == len(each.prompts):
                parts.append(None)
                if each is not None and name == "evaluate":
                    hint = f"All rows of {each.name} have the same prompt: give evaluate.prompts."
                    problems.append(InputError("evaluate.share", share, hint))
                continue
            others = frozenset(range(len(each.prompts))) - held
            parts.append(each.without(others if name == "evaluate" else held))
        divided[name] = tuple(parts)
    return divided


def _read_prompt_set(config: RunConfig, dataset: DatasetSection) -> tuple[PromptFile, PromptSet]:
    column = dataset.target_column
    roles = () if column is None else (column,)
    choice = DatasetChoice(dataset.split, dataset.subset, dataset.revision, dataset.streaming)
    file = read_prompts(
        dataset.prompts,
        column=dataset.prompt_column,
        columns=dataset.columns,
        also=roles,
        limit=dataset.limit if dataset.streaming else None,
        choice=choice,
        images=_source_columns(config, dataset),
        captions=policy_family(config.policy.kind).modality == "image",
    )
    default = default_size(config, dataset)
    # Of a text model, columns of these names are ordinary ones.
    sizes = read_sizes(file.prompts, source=dataset.prompts, default=default) if default else ()
    # Images of a folder pair with all prompts of the file, so the limit comes last.
    targets = pair_targets(file.prompts, folder=dataset.targets, column=column, base=file.folder, sizes=sizes)
    within = slice(dataset.limit)
    limited = PromptSet(dataset.name, dataset.weight, file.prompts[within], targets[within], sizes[within])
    return file, limited


def _source_columns(config: RunConfig, dataset: DatasetSection) -> SourceColumns | None:
    """Return which columns are images in prompts; None where all are columns like any other."""
    if dataset.image_column is None and not policy_family(config.policy.kind).reads_images:
        return None
    return SourceColumns(dataset.image_column, dataset.max_image_pixels or MAX_PIXELS, dataset.limit)


def _notes(dataset: DatasetSection, file: PromptFile, prompts: PromptSet) -> Iterator[str]:
    if dataset.prompt_column is None and file.column != "prompt":
        yield f"the prompts are column {file.column}"
    if file.commit is not None and file.commit != dataset.revision:
        yield f"commit {file.commit}; set revision to it, and the prompts stay these when the dataset changes"
    if images := [source for prompt in prompts.prompts for source in prompt.sources]:
        shown = sum(bool(prompt.sources) for prompt in prompts.prompts)
        where = f" (column {', '.join(file.source_columns)})" if file.source_columns else ""
        largest = max((source.size for source in images), key=lambda size: size.pixels)
        yield f"{shown} of {len(prompts.prompts)} prompts have images, {len(images)}{where}; the largest is {largest}"
    if begun := sum(bool(answer_begun(prompt.text)) for prompt in prompts.prompts):
        yield f"in {begun} of {len(prompts.prompts)} prompts the assistant begins the answer, which the model continues"
    lengths = {row: len(prompt.text) for row, prompt in enumerate(prompts.prompts, start=1)}
    longer = [row for row, length in lengths.items() if length > LONG_PROMPT]
    if longer:
        row = max(longer, key=lengths.__getitem__)
        others = f"; {len(longer) - 1} more have over {LONG_PROMPT}" if len(longer) > 1 else ""
        yield (
            f"prompt {prompts.prompts[row - 1].prompt_id} (row {row}) has {lengths[row]} characters{others}: "
            "memory and time grow with the longest prompt"
        )


def _overlap(sets: Mapping[str, Sequence[PromptSet | None]]) -> Iterator[str]:
    training, heldout = (
        [prompt.prompt_id for each in sets[section] if each is not None for prompt in each.prompts]
        for section in ("data", "evaluate")
    )
    if known := len({*training} & {*heldout}):
        yield (
            f"evaluate: {known} of {counted(len({*heldout}), 'prompt')} {'is' if known == 1 else 'are'} also in data: "
            "the held-out reward of those says nothing about new prompts"
        )


def _first_and_last_pair(prompts: PromptSet) -> str:
    """Name the targets of two prompts, so that a person sees whether they belong together; empty without any."""
    paired = [each for each in zip(prompts.prompts, prompts.targets, strict=True) if each[1] is not None]
    shown = []
    for prompt, target in (*paired[:1], *paired[1:][-1:]):
        text = printable(one_line(prompt.text, _SHOWN_LETTERS))
        shown.append(f"{text} -> {posixpath.basename(target.uri) if target else ''}")
    return "; ".join(shown)


def default_size(config: RunConfig, dataset: DatasetSection) -> ImageSize | None:
    """Return the size of images whose row gives none; None for texts."""
    if not isinstance(config.rollout, ImageRolloutSection):
        return None
    if dataset.width is not None and dataset.height is not None:
        return ImageSize(dataset.width, dataset.height)
    return config.rollout.size


def sizes_of(
    config: RunConfig,
    prompts: PromptFiles,
    parts: Collection[str],
    meant: Callable[[str, Prompt], bool] = lambda *_: True,
) -> Iterator[tuple[ImageSize, str]]:
    """Yield each size of the prompts that are meant, once a dataset, with the place that gives it."""
    for part in parts:
        for (own, dataset), known in zip(config.prompt_sections[part].placed(part), prompts.sets[part], strict=True):
            default = "rollout" if dataset.width is None else own
            rows: dict[ImageSize, int] = {}
            # Texts have no sizes.
            for row, (prompt, size) in enumerate(zip(known.prompts, known.sizes, strict=False), 1) if known else ():
                if size not in rows and meant(dataset.name, prompt):
                    rows[size] = row
            for size, row in rows.items():
                by_row = size_place(dataset.prompts, row).replace("data.", f"{own}.", 1)
                yield size, f"{default}.width and height" if size == default_size(config, dataset) else by_row


def first_of(problems: list[InputError], what: str = "sizes") -> list[InputError]:
    """Return the first problems; the last of them says how many there are besides."""
    more = len(problems) - MAX_PROBLEMS
    if more <= 0:
        return problems
    *shown, last = problems[:MAX_PROBLEMS]
    return [*shown, InputError(last.place, last.value, f"{last.hint} {more} more {what} are refused.")]
