"""The report and the table of each iteration in Prefect's UI: cheap, and of bounded size."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from PIL import Image

from tasks.metrics.names import SECONDS
from tasks.reports.images import PRUNED, fitted, image_uri
from tasks.reports.metric_titles import REPORTED, REPORTED_OF_TEXTS, metric_title, with_streams
from tasks.reports.report import Cells, Report, Table, markdown_of
from tasks.reports.samples import Row, Samples, best_first, read_samples
from tasks.reports.text import change, in_cell, markdown_table, number, one_line, significant, sparkline
from tasks.runs.layout import STATES
from tasks.runs.records import SamplingRound
from tasks.runs.run_view import Noun, dataset_of
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

MAX_IMAGES, MAX_GROUPS = 4, 8
THUMBNAIL = 112
PROMPT_LETTERS, TEXT_LETTERS = 160, 400

_COLUMNS = ("sample_id", "group_id", "dataset", "prompt", "completion", "width", "height")


@dataclass(frozen=True)
class IterationRecord:
    """One iteration as the reports see it.

    Attributes:
        iteration: number, from 1.
        rounds: rollouts and their rewards; more than one where groups without spread were replaced.
        advantages: rewards and advantages of the samples of all rounds.
        metrics: metrics of all its stages, by name.
        heldout: held-out reward of the policy that it made, where that was evaluated.
        reused: name of the run that a stage's results were copied from, by stage; own results are left out.
        stored: whether an earlier start of the run has reported it already.
    """

    iteration: int
    rounds: tuple[SamplingRound, ...]
    advantages: ArtifactRef
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


def iteration_markdown(store: ArtifactStore, run: str, history: Sequence[IterationRecord]) -> str:
    """Write the last iteration's metrics, the reward over the iterations so far, and the best and worst samples."""
    record = history[-1]
    rollouts = [each.rollouts for each in record.rounds]
    rewards = [pair for each in record.rounds for pair in each.rewards.items()]
    with store.reading(without=(STATES,)) as read:
        table = read_samples(read, rollouts, rewards, [record.advantages], _COLUMNS)
        tables = [Table("", list(_metric_rows(record, table))), Table("", list(_curves(history)))]
        lines = [markdown_of(Report(f"{run}: iteration {record.iteration}", tables=tables))]
        lines += list(_texts(table) if table.is_text else _images(table))
    stored = [reference.uri for each in record.rounds for reference in each.stages] + [record.advantages.uri]
    lines += [f"Stored in {', '.join(f'`{uri}`' for uri in stored)}.", ""]
    return "\n".join(lines)


def _metric_rows(record: IterationRecord, table: Samples) -> Iterator[Cells]:
    noun: Noun = "completion" if table.is_text else "image"
    names = with_streams((*REPORTED, *(REPORTED_OF_TEXTS if table.is_text else ())), record.metrics)
    names += [name for name in sorted(record.metrics) if dataset_of(name) is not None]
    names += ["groups_dropped"] if record.metrics.get("groups_dropped") else []
    names += ["rounds"] if len(record.rounds) > 1 else []
    for name in names:
        if name in record.metrics:
            title = metric_title(name, noun, table.stream)[0]
            yield {"metric": title, "value": significant(record.metrics[name])}


def _curves(history: Sequence[IterationRecord]) -> Iterator[Cells]:
    names = ["reward", *(name for name in history[-1].metrics if dataset_of(name) is not None)]
    series = {name: [past.metrics[name] for past in history if name in past.metrics] for name in names}
    series["heldout_reward"] = [past.heldout for past in history if past.heldout is not None]
    for name, values in series.items():
        if values:
            title = metric_title(name)[0]
            yield {"over iterations": title, "": sparkline(values), "first → last": change(values[0], values[-1])}


def _images(table: Samples) -> Iterator[str]:
    """Write the iteration's best and worst images with reward, scores and prompt."""
    ranked = best_first(table.rows)
    best, worst = ranked[:MAX_IMAGES], ranked[MAX_IMAGES:][-MAX_IMAGES:][::-1]
    images = table.images([row["sample_id"] for row in (*best, *worst)])
    for title, chosen in (("Best", best), ("Worst", worst)):
        if chosen:
            rows = [
                [
                    _thumbnail(row["sample_id"], images),
                    f"**{number(row['reward'])}**",
                    *map(number, row["breakdown"].values()),
                    in_cell(one_line(row["prompt"], PROMPT_LETTERS)),
                    *(in_cell(row[name]) for name in table.varying),
                    f"`{row['sample_id']}`",
                ]
                for row in chosen
            ]
            header = ["image", "reward", *chosen[0]["breakdown"], "prompt", *table.varying, "sample"]
            yield from (f"## {title}", "", *markdown_table(header, rows), "")


def _thumbnail(sample_id: str, images: Mapping[str, Image.Image]) -> str:
    if sample_id not in images:
        return PRUNED
    return f"![{sample_id}]({image_uri(fitted(images[sample_id], THUMBNAIL), lossless_side=0, quality=80)})"


def _texts(table: Samples) -> Iterator[str]:
    """Write each prompt with its best and its worst completion."""
    groups = table.groups
    rows = []
    for group in groups[:MAX_GROUPS]:
        first, ranked = group[0], best_first(group)
        ends = [_completion(row) for row in (*ranked[:1], *ranked[1:][-1:])]
        prompt = in_cell(one_line(first["prompt"], PROMPT_LETTERS))
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
    return f"**{number(row['reward'])}** ({', '.join(parts)}): {text}"
