"""Trainings of the tiny text model made sick on purpose, one for each sign of docs/is_it_learning.md, and their plots.

`python -m tests.bench.sick_runs [NAME...]` trains each beside a healthy run, and writes docs/sick_NAME.png. The slow
test of the signs trains the same runs. This file is also the source of their rewards.
"""

import io
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.runs.run_view import RunView

CONFIG, FIGURES = "configs/tiny_text.yaml", Path("docs")
ITERATIONS = 16
COMMON: Mapping[str, Any] = {
    "run.iterations": ITERATIONS,
    "rollout.prompts_per_iteration": 8,
    "rollout.prompts_per_batch": 8,
    "update.minibatch_size": 64,
    "update.micro_batch_size": 64,
    "update.kl_coef": 0.01,
    "evaluate.prompts": None,
}
EVALUATED: Mapping[str, Any] = {
    "evaluate.prompts": "data/prompts/letters_heldout.jsonl",
    "run.iterations": 10,
    "evaluate.every": 1,
    "evaluate.limit": 16,
    "evaluate.samples_per_prompt": 4,
}


def of_the_prompt(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward that does not read the completion: siblings all have the same."""
    return [len(prompt) / 40 for prompt in prompts]


def six_letters(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward that is soon as high as it can be: for answers of at least six letters."""
    return [min(1.0, len(text) / 6) for text in completions]


def letter_a(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward for writing one letter only, higher for some prompts than for others."""
    return [text.count("a") / 24 * (1 + len(prompt) % 3) for prompt, text in zip(prompts, completions, strict=True)]


def letters(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward for long answers, whatever they say."""
    return [len(text) / 24 for text in completions]


def _function(name: str) -> dict[str, Any]:
    return {"reward": "function", "settings": {"function": f"{Path(__file__).resolve()}:{name}"}}


@dataclass(frozen=True)
class SickRun:
    """A training that goes wrong.

    Attributes:
        title: what is wrong with it.
        signs: names of the signs that it shows, in order.
        settings: what makes it sick, by dotted key.
        plotted: metrics in its figure.
        shared: further settings, of the healthy run beside it too.
    """

    title: str
    signs: tuple[str, ...]
    settings: Mapping[str, Any]
    plotted: tuple[str, ...]
    shared: Mapping[str, Any] = field(default_factory=dict)


SICK_RUNS: Mapping[str, SickRun] = {
    "learning_rate": SickRun(
        "learning rate 30 times too high",
        ("kl", "reward-fell"),
        {"update.learning_rate": 0.03},
        ("reward", "kl", "entropy"),
    ),
    "kl": SickRun(
        "the KL grows", ("kl",), {"update.learning_rate": 0.006, "update.kl_coef": 1e-4}, ("reward", "kl", "entropy")
    ),
    "kl_coef": SickRun("KL coefficient 20", ("kl-penalty",), {"update.kl_coef": 20.0}, ("reward", "kl", "loss")),
    "temperature": SickRun(
        "temperature 0.01",
        ("entropy",),
        {"rollout.temperature": 0.01, "update.kl_coef": 0.0},
        ("entropy", "frac_reward_zero_std", "reward"),
    ),
    "entropy": SickRun(
        "a reward for one letter",
        ("entropy",),
        {"rewards": [_function("letter_a")], "update.learning_rate": 0.003, "update.kl_coef": 0.0},
        ("entropy", "frac_reward_zero_std", "reward"),
    ),
    "constant": SickRun(
        "the same reward for all completions of a prompt",
        ("groups-without-spread",),
        {"rewards": [_function("of_the_prompt")]},
        ("frac_reward_zero_std", "reward_std_within_groups", "grad_norm"),
    ),
    "bound": SickRun(
        "a reward that is too easy",
        ("reward-at-bound",),
        {"rewards": [_function("six_letters")], "update.kl_coef": 0.0},
        ("reward", "frac_reward_zero_std", "grad_norm"),
    ),
    "clip_range": SickRun(
        "clip range 0.000001",
        ("clipped",),
        {"update.clip_range": 1e-6},
        ("clip_ratio/region_mean", "reward", "grad_norm"),
        {"update.epochs": 4},
    ),
    "hacked": SickRun(
        "a reward for long answers",
        ("reward-hacking",),
        {
            "rewards": [_function("letters"), {"reward": "answer", "weight": 0.0}],
            "update.learning_rate": 5e-4,
            "update.kl_coef": 0.0,
        },
        ("heldout_reward", "rewards/answer/mean", "completions/mean_length"),
        EVALUATED,
    ),
}


def settings_of(run: SickRun, *, healthy: bool = False) -> dict[str, Any]:
    """Return the settings by dotted key of a sick run, or of the healthy one beside it."""
    return {**COMMON, **run.shared, **({} if healthy else run.settings)}


def main(names: Sequence[str] = ()) -> None:
    """Train the runs of these names, all by default, and draw their figures."""
    from flows import train
    from tasks.runs.lookup import find_run
    from tasks.runs.read_run import read_run
    from tasks.runs.reader import RunReader

    with tempfile.TemporaryDirectory() as root:
        for name in names or SICK_RUNS:
            run, histories = SICK_RUNS[name], []
            for healthy in (True, False):
                settings = settings_of(run, healthy=healthy)
                label = f"healthy{len(run.shared)}" if healthy else name
                train(CONFIG, overrides={**settings, "run.name": label, "storage.root": root}, progress=False)
                histories.append(read_run(RunReader(find_run(label, root))))
            print(name, [str(sign) for sign in histories[1].signs], [str(sign) for sign in histories[0].signs])
            (FIGURES / f"sick_{name}.png").write_bytes(_draw(run, *histories))


def _draw(run: SickRun, healthy: "RunView", sick: "RunView") -> bytes:
    named = ", ".join(f"{sign.name} (iteration {sign.iteration})" for sign in sick.signs)
    lines = {"healthy": (healthy, "#2563eb"), "sick": (sick, "#c2410c")}
    title = run.title[0].upper() + run.title[1:]
    note, dashed = f"over iterations; dashed: {named}", [sign.iteration for sign in sick.signs]
    return draw_panels(title, note, run.plotted, lines, dashed)


def draw_panels(
    title: str,
    note: str,
    metrics: Sequence[str],
    lines: Mapping[str, tuple["RunView", str]],
    dashed: Sequence[int] = (),
) -> bytes:
    """Plot metrics of runs side by side, as a PNG.

    Args:
        lines: label -> a run and its colour.
        dashed: iterations with a vertical line.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    from PIL import Image

    from tasks.reports.text import metric_title

    soft, line = "#5b6470", "#dfe3e8"
    figure = Figure(figsize=(10.5, 2.9), dpi=110, layout="constrained", facecolor="white")
    for axes, metric in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(line)
        axes.tick_params(colors=soft, labelsize=9, length=3)
        axes.grid(True, axis="y", color=line, linewidth=0.8)
        axes.margins(x=0.02, y=0.1)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        axes.set_title(metric_title(metric, "completion")[0], fontsize=10, loc="left")
        for label, (history, colour) in lines.items():
            points = history.heldout_series() if metric == "heldout_reward" else history.series(metric)
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.8, marker=".", label=label)
        for iteration in dashed:
            axes.axvline(iteration, color=soft, linewidth=1, linestyle="--")
    if len(lines) > 1:
        at = figure.axes[-1]
        at.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9, labelcolor="linecolor")
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    figure.supxlabel(note, x=0.012, ha="left", fontsize=9, color=soft)
    drawn, written = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(64).save(written, "PNG", optimize=True)
    return written.getvalue()


if __name__ == "__main__":
    main(sys.argv[1:])
