"""The report of each iteration in Prefect's UI, and the held-out samples before and after training."""

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from PIL import Image

from grpo_core.messages import shown_prompt, shown_question
from tasks.metrics import SECONDS
from tasks.progress import log
from tasks.prompts.targets import TargetReference, load_target
from tasks.reports.images import PRUNED, PromptImages, fitted, image_uri
from tasks.reports.report import Cells, Report, Table, markdown_of, signs_notice
from tasks.reports.samples import Row, Samples, best_first, read_samples
from tasks.reports.text import (
    REPORTED,
    REPORTED_OF_TEXTS,
    TRUNCATED,
    change,
    fenced,
    in_cell,
    markdown_table,
    metric_title,
    number,
    one_line,
    significant,
    sparkline,
    with_streams,
)
from tasks.runs.layout import CONTACT_SHEET, HELDOUT_TEXTS, ROLLOUTS, STATES, SamplingRound, stage_folder
from tasks.runs.run_view import Noun, dataset_of
from tasks.runs.signs import Sign
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

if TYPE_CHECKING:
    from tasks.reports.fonts import Fonts

MAX_IMAGES, MAX_GROUPS = 4, 8
THUMBNAIL = 112
PROMPT_LETTERS, TEXT_LETTERS = 160, 400

_COLUMNS = (
    *("sample_id", "group_id", "prompt_id", "dataset", "prompt", "sources"),
    *("completion", "finished", "width", "height"),
)


@dataclass(frozen=True)
class IterationRecord:
    """One iteration as the reports see it.

    Attributes:
        iteration: number, from 1.
        rounds: rollouts and their rewards; more than one where groups without spread were replaced.
        advantages: rewards and advantages of the samples of all rounds; None where only the metrics are known.
        metrics: metrics of all its stages, by name.
        heldout: held-out reward of the policy that it made, where that was evaluated.
        reused: name of the run that a stage's results were copied from, by stage; own results are left out.
        stored: whether an earlier start of the run has reported it already.
    """

    iteration: int
    rounds: tuple[SamplingRound, ...]
    advantages: ArtifactRef | None
    metrics: Mapping[str, float]
    heldout: float | None = None
    reused: Mapping[str, str] = field(default_factory=dict)
    stored: bool = False

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of this run's own stages, by stage."""
        measured = {
            name.removeprefix(SECONDS): value for name, value in self.metrics.items() if name.startswith(SECONDS)
        }
        return {stage: value for stage, value in measured.items() if stage not in self.reused}


def iteration_table(record: IterationRecord) -> list[dict[str, object]]:
    """List every metric of the iteration by name, to six significant digits."""
    return [{"metric": name, "value": float(f"{value:.6g}")} for name, value in sorted(record.metrics.items())]


def iteration_markdown(
    store: ArtifactStore,
    run: str,
    history: Sequence[IterationRecord],
    trained_on: str | None = None,
    signs: Sequence[Sign] = (),
    heldout: Sequence[float] = (),
) -> str:
    """Write the last iteration's metrics, the reward over the iterations so far, and the best and worst samples.

    Args:
        trained_on: name of the rescoring whose rewards a replay is trained on; None where they are the run's own.
        signs: of the run so far, shown first.
        heldout: the held-out rewards of the policies that were evaluated, from that before training on.
    """
    record = history[-1]
    advantages = record.advantages
    assert advantages is not None, "the last record has its tables"
    rollouts = [each.rollouts for each in record.rounds]
    rewards = [pair for each in record.rounds for pair in each.rewards.items()]
    with store.reading(without=(STATES,)) as read:
        table = read_samples(read, rollouts, rewards, [advantages], _COLUMNS)
        tables = [
            Table("", list(_metric_rows(record, table, trained_on))),
            Table("", list(_curves(history, heldout, trained_on))),
        ]
        title = f"{run}: iteration {record.iteration}"
        lines = [markdown_of(Report(title, tables=tables, notices=[signs_notice(signs)]))]
        images_of = PromptImages(THUMBNAIL, store, *_stores_of(store, rollouts))
        lines += list(_texts(table, images_of) if table.is_text else _images(table, images_of))
    stored = [reference.uri for each in record.rounds for reference in each.stages] + [advantages.uri]
    lines += [f"Stored in {', '.join(f'`{uri}`' for uri in stored)}.", ""]
    return "\n".join(lines)


def _metric_rows(record: IterationRecord, table: Samples, trained_on: str | None) -> Iterator[Cells]:
    noun: Noun = "completion" if table.is_text else "image"
    names = with_streams((*REPORTED, *(REPORTED_OF_TEXTS if table.is_text else ())), record.metrics)
    names += [name for name in sorted(record.metrics) if dataset_of(name) is not None]
    names += ["groups_dropped"] if record.metrics.get("groups_dropped") else []
    names += ["rounds"] if len(record.rounds) > 1 else []
    for name in names:
        if name in record.metrics:
            title = metric_title(name, noun, table.stream, trained_on)[0]
            yield {"metric": title, "value": significant(record.metrics[name])}


def _curves(history: Sequence[IterationRecord], heldout: Sequence[float], trained_on: str | None) -> Iterator[Cells]:
    names = ["reward", *(name for name in history[-1].metrics if dataset_of(name) is not None)]
    series = {name: [past.metrics[name] for past in history if name in past.metrics] for name in names}
    series["heldout_reward"] = list(heldout)
    for name, values in series.items():
        if values:
            title = metric_title(name, trained_on=trained_on)[0]
            yield {"over iterations": title, "": sparkline(values), "first → last": change(values[0], values[-1])}


def _stores_of(store: ArtifactStore, rollouts: Sequence[ArtifactRef]) -> list[ArtifactStore]:
    """Return the runs that rollouts are of, if not of this one: a replay has those of its source."""
    runs = dict.fromkeys(reference.run for reference in rollouts if reference.run != store.run)
    return [ArtifactStore(store.root, run) for run in runs]


def _images(table: Samples, images_of: PromptImages) -> Iterator[str]:
    """Write the best and worst images of the iteration, with reward, scores and prompt."""
    ranked = best_first(table.rows)
    best = _of_different_prompts(ranked)
    shown = {row["sample_id"] for row in best}
    worst = _of_different_prompts([row for row in reversed(ranked) if row["sample_id"] not in shown])
    images = table.images([row["sample_id"] for row in (*best, *worst)])
    shows_sources = any(row.get("sources") for row in table.rows)
    for title, chosen in (("Best", best), ("Worst", worst)):
        if chosen:
            rows = [
                [
                    *([_sources(images_of, row)] if shows_sources else []),
                    _thumbnail(row["sample_id"], images),
                    f"**{number(row['reward'])}**",
                    *map(number, row["breakdown"].values()),
                    in_cell(one_line(shown_question(row["prompt"]), PROMPT_LETTERS)),
                    *(in_cell(row[name]) for name in table.varying),
                    f"`{row['sample_id']}`",
                ]
                for row in chosen
            ]
            header = [
                *(["source"] if shows_sources else []),
                "image",
                "reward",
                *chosen[0]["breakdown"],
                "prompt",
                *table.varying,
                "sample",
            ]
            yield from (f"## {title}", "", *markdown_table(header, rows), "")


def _of_different_prompts(rows: Sequence[Row]) -> list[Row]:
    """Choose the first MAX_IMAGES rows of different prompts, and with fewer prompts the next ones of each in turn."""
    turns, counts = [], Counter[str]()
    for row in rows:
        turns.append(counts[row["prompt_id"]])
        counts[row["prompt_id"]] += 1
    # Sorting keeps the order of rows with the same turn.
    chosen = sorted(range(len(rows)), key=turns.__getitem__)[:MAX_IMAGES]
    return [rows[index] for index in sorted(chosen)]


def _thumbnail(sample_id: str, images: Mapping[str, Image.Image]) -> str:
    if sample_id not in images:
        return PRUNED
    return _embedded(sample_id, images[sample_id])


def _embedded(name: str, image: Image.Image) -> str:
    return f"![{name}]({image_uri(fitted(image, THUMBNAIL), lossless_side=0, quality=80)})"


def _sources(images_of: PromptImages, row: Row) -> str:
    """Write the images in the prompt of a sample."""
    return " ".join(_embedded("source", image) for image in images_of.sources(row))


def _texts(table: Samples, images_of: PromptImages) -> Iterator[str]:
    """Write each prompt with its best and its worst completion."""
    groups = table.groups
    rows = []
    for group in groups[:MAX_GROUPS]:
        first, ranked = group[0], best_first(group)
        ends = [_completion(row) for row in (*ranked[:1], *ranked[1:][-1:])]
        prompt = " ".join(
            filter(
                None, (_sources(images_of, first), in_cell(one_line(shown_question(first["prompt"]), PROMPT_LETTERS)))
            )
        )
        dropped = "dropped" if first["dropped"] else ""
        rows.append(
            [prompt, *(in_cell(first[name]) for name in table.varying), *ends, *[""] * (2 - len(ends)), dropped]
        )
    yield from ("## Best and worst completion of each prompt", "")
    yield from (*markdown_table(["prompt", *table.varying, "best", "worst", ""], rows), "")
    if len(groups) > MAX_GROUPS:
        yield from (f"The first {MAX_GROUPS} of {len(groups)} prompts.", "")


def _completion(row: Row) -> str:
    parts = [f"{label} {number(value)}" for label, value in row["breakdown"].items()]
    text = in_cell(one_line(row["completion"], TEXT_LETTERS)) or "*empty*"
    cut = "" if row["finished"] else TRUNCATED
    return f"**{number(row['reward'])}** ({', '.join(parts)}){cut}: {text}"


GAP, LABEL, HEAD, SMALL_LETTERS = 6, 230, 52, 11
"""Pixels of the sheet between images, left of them and above them, and of the size of its letters."""

MAX_SHEET_ROWS, MAX_SHEET_COLUMNS = 100, 16
"""Prompts of the sheet, and images of a prompt and of each side: 54 million pixels at most. Pillow, and with it
Prefect's page, opens no image of more than 179 million, and warns from 89 million on."""

_HELDOUT_COLUMNS = (
    *("sample_id", "group_id", "prompt", "sources"),
    *("target_uri", "target_sha256", "completion", "finished"),
)

Sides = tuple[Sequence[Row], Sequence[Row]]
"""The samples of one prompt before and after training; `image` is None where it was pruned, `source_images` are those
in the prompt."""


def write_contact_sheet(store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, title: str) -> str:
    """Write the images of two evaluations, named by their advantages, next to each other, and return the path."""
    buffer = io.BytesIO()
    pairs, total = _pairs(store, before, after, limit=MAX_SHEET_ROWS)
    if total > len(pairs):
        title = f"{title}, the first {len(pairs)} of {total}"
    contact_sheet(pairs, title=title).save(buffer, "PNG")
    store.write_file(CONTACT_SHEET, buffer.getvalue())
    return store.path(CONTACT_SHEET)


def write_heldout_texts(store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, title: str) -> str:
    """Write the complete texts of two evaluations, named by their advantages, as Markdown, and return the path."""
    pairs, _ = _pairs(store, before, after)
    everything = [[row for pair in pairs for row in pair[side]] for side in (0, 1)]
    lines = [f"# {title}", "", f"Mean reward {change(*map(_mean, everything))}; the same seeds.", ""]
    for index, pair in enumerate(pairs, start=1):
        lines += [
            f"## Prompt {index}: reward {change(*map(_mean, pair))}",
            "",
            fenced(shown_prompt(pair[0][0]["prompt"])),
            "",
        ]
        if images := pair[0][0]["source_images"]:
            lines += [" ".join(_embedded("source", image) for image in images), ""]
        for name, rows in zip(("Before training", "After training"), pair, strict=True):
            for row in rows:
                cut = "" if row["finished"] else TRUNCATED
                lines += [f"{name}, reward {number(row['reward'])}{cut}", "", fenced(row["completion"]), ""]
    store.write_file(HELDOUT_TEXTS, "\n".join(lines).encode())
    return store.path(HELDOUT_TEXTS)


def _pairs(
    store: ArtifactStore, before: ArtifactRef, after: ArtifactRef, *, limit: int | None = None
) -> tuple[list[Sides], int]:
    """Read two evaluations, and pair the samples of each prompt by their group id.

    Args:
        limit: number of prompts to read, the first; None for all.

    Returns:
        These prompts, and the number of all.
    """
    groups, images_of = list[dict[str, Sequence[Row]]](), PromptImages(THUMBNAIL, store)
    with store.reading(without=(STATES,)) as read:
        for side in (before, after):
            rollouts = store.find(f"{stage_folder(side.folder)}/{ROLLOUTS}")
            assert rollouts is not None, "an evaluation keeps its rollouts"
            table = read_samples(read, [rollouts], (), [side], _HELDOUT_COLUMNS)
            found = {group[0]["group_id"]: group for group in table.groups}
            shown = list(groups[0] if groups else found)[:limit]
            rows = [row for group_id in shown for row in found[group_id]]
            images = {} if table.is_text else table.images([row["sample_id"] for row in rows])
            for row in rows:
                row["image"] = images.get(row["sample_id"])
                row["source_images"] = images_of.sources(row)
                row["target_uri"] = images_of.find(row["target_uri"]) if row.get("target_uri") else None
            groups.append({group_id: found[group_id] for group_id in shown})
    return [(earlier, groups[1][group_id]) for group_id, earlier in groups[0].items()], len(found)


def _mean(rows: Sequence[Row]) -> float | None:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return fmean(rewards) if rewards else None


def contact_sheet(pairs: Sequence[Sides], *, title: str, side: int = 96) -> Image.Image:
    """Lay out a row per held-out prompt: its images, target, images before and images after, `side` pixels each.

    Of a prompt's own images and of its samples the first MAX_SHEET_COLUMNS are shown.
    """
    # Matplotlib, whose fonts these are, takes a while to import.
    from tasks.reports.fonts import FONTS_HINT, fonts_for

    fonts = fonts_for([title, *(before[0]["prompt"] for before, _ in pairs)])
    if fonts.missing_scripts:
        log(f"{CONTACT_SHEET} has code points in place of letters of {fonts.missing_scripts}. {FONTS_HINT}")
    targets = any(before[0].get("target_uri") for before, _ in pairs)
    per_side = min(max(len(before) for before, _ in pairs), MAX_SHEET_COLUMNS)
    sources = min(max(len(before[0].get("source_images", ())) for before, _ in pairs), MAX_SHEET_COLUMNS)
    target_x = LABEL + (sources * (side + GAP) + 2 * GAP if sources else 0)
    before_x = target_x + (side + 3 * GAP if targets else 0)
    after_x = before_x + per_side * (side + GAP) + 3 * GAP
    after = "after training, same seeds"
    width = after_x + max(per_side * (side + GAP), fonts.width(after, SMALL_LETTERS)) + GAP
    sheet = Image.new("RGB", (width, HEAD + len(pairs) * (side + GAP) + GAP), "#eef0f3")
    fonts.draw(sheet, (10, 22), fonts.shown(title), 14, "#111111")
    headings = [(before_x, "before training"), (after_x, after)]
    headings += [(target_x, "target")] if targets else []
    headings += [(LABEL, "source")] if sources else []
    for x, heading in headings:
        fonts.draw(sheet, (x, 44), heading, SMALL_LETTERS, "#444444")
    for index, pair in enumerate(pairs):
        top, first = HEAD + index * (side + GAP), pair[0][0]
        for place, line in enumerate(_label(pair, fonts)):
            fonts.draw(sheet, (10, top + 14 + 15 * place), line, SMALL_LETTERS, "#111111")
        if first.get("target_uri"):
            target = load_target(TargetReference(first["target_uri"], first["target_sha256"]))
            sheet.paste(fitted(target, side), (target_x, top))
        for place, image in enumerate(first.get("source_images", ())[:sources]):
            sheet.paste(fitted(image, side), (LABEL + place * (side + GAP), top))
        for start, rows in zip((before_x, after_x), pair, strict=True):
            for place, row in enumerate(rows[:per_side]):
                left = start + place * (side + GAP)
                if row["image"] is None:
                    fonts.draw(sheet, (left + GAP, top + side // 2), PRUNED, SMALL_LETTERS, "#888888")
                else:
                    sheet.paste(fitted(row["image"], side), (left, top))
    return sheet


def _label(pair: Sides, fonts: "Fonts") -> list[str]:
    lines = fonts.lines(pair[0][0]["prompt"], SMALL_LETTERS, LABEL - 20, 5)
    before, after = map(_mean, pair)
    if before is not None and after is not None:
        lines.append(f"reward {number(before)} → {number(after)}")
    return lines
