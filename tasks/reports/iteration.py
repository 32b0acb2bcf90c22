"""The report of each iteration in Prefect's UI."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_core.rollouts.messages import shown_question
from tasks.metrics import SECONDS
from tasks.process import map_in_threads
from tasks.reports.groups import Row, Samples, best_first, read_shown_samples
from tasks.reports.images import PRUNED, THUMBNAIL, PromptImages, embedded
from tasks.reports.report import Cells, Report, Table, markdown_of, signs_notice
from tasks.reports.text import (
    REPORTED,
    REPORTED_OF_TEXTS,
    TRUNCATED,
    change,
    in_cell,
    markdown_table,
    metric_title,
    number,
    one_line,
    significant,
    sparkline,
    with_streams,
)
from tasks.runs.layout import STATES, SamplingRound
from tasks.runs.run_view import Noun, dataset_of
from tasks.runs.signs import Sign
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

MAX_IMAGES, MAX_GROUPS = 4, 8
PROMPT_LETTERS, TEXT_LETTERS = 160, 400

_COLUMNS = (
    *("sample_id", "group_id", "prompt_id", "dataset", "prompt", "sources"),
    *("completion", "finished", "width", "height"),
)


@dataclass(frozen=True)
class IterationRecord:
    """One iteration as the reports see it."""

    iteration: int
    # Rollouts and their rewards; more than one where groups without spread were replaced.
    rounds: tuple[SamplingRound, ...]
    # Rewards and advantages of the samples of all rounds; None where only the metrics are known.
    advantages: ArtifactRef | None
    metrics: Mapping[str, float]  # metrics of all its stages, by name
    heldout: float | None = None  # held-out reward of the policy that it made, where that was evaluated
    # Name of the run that a stage's results were copied from, by stage; own results are left out.
    reused: Mapping[str, str] = field(default_factory=dict)
    stored: bool = False  # whether an earlier start of the run has reported it already

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
    """Write the last iteration's metrics, rewards so far, and best and worst samples; `heldout` of each evaluation."""
    record = history[-1]
    advantages = record.advantages
    assert advantages is not None, "the last record has its tables"
    rollouts = [each.rollouts for each in record.rounds]
    rewards = [pair for each in record.rounds for pair in each.rewards.items()]
    with store.reading(without=(STATES,)) as read:
        # At once: those of a bucket take long one after another.
        map_in_threads(read, [*rollouts, *(reference for _, reference in rewards), advantages])
        table = read_shown_samples(read, rollouts, rewards, [advantages], _COLUMNS)
        tables = [
            Table("", list(_metric_rows(record, table, trained_on))),
            Table("", list(_curves(history, heldout, trained_on))),
        ]
        title = f"{run}: iteration {record.iteration}"
        lines = [markdown_of(Report(title, tables=tables, notices=[signs_notice(signs)]))]
        # A replay has the rollouts of its source.
        others = dict.fromkeys(each.run for each in rollouts if each.run != store.run)
        images_of = PromptImages(THUMBNAIL, store, *(ArtifactStore(store.root, run) for run in others))
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


def _images(table: Samples, images_of: PromptImages) -> Iterator[str]:
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
                    embedded(name, images[name]) if (name := row["sample_id"]) in images else PRUNED,
                    f"**{number(row['reward'])}**",
                    *map(number, row["breakdown"].values()),
                    in_cell(one_line(shown_question(row["prompt"]), PROMPT_LETTERS)),
                    *(in_cell(row[name]) for name in table.varying),
                    f"`{name}`",
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


def _sources(images_of: PromptImages, row: Row) -> str:
    return " ".join(embedded("source", image) for image in images_of.sources(row))


def _texts(table: Samples, images_of: PromptImages) -> Iterator[str]:
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
