import re
import subprocess
import sys

import numpy as np
import pytest

from tasks.reports.plots import line_plot, plot_distribution, plot_joint
from tests.tasks.reports.test_run_page import Page


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.61, 0.76], [0.6, 0.65, 0.7, 0.75, 0.8]),
        ([5e-6, 2.95e-5, 1e-5], [0.0, 1e-5, 2e-5, 3e-5]),
        ([-1.0, 1e9, 1.0], [-5e8, 0.0, 5e8, 1e9]),
        ([0.0], [0.0, 0.5, 1.0]),
        ([7.0, 7.0], [6.0, 6.5, 7.0, 7.5, 8.0]),
    ],
)
def test_points_lie_between_round_ticks_and_say_their_values(values: list[float], ticks: list[float]) -> None:
    plot = line_plot("t", "m", {"a <b>": list(enumerate(values, start=1)), "none": []})
    assert plot is not None
    assert plot["lines"] == [("a <b>", f"{values[-1]:.4g}", 0)]
    page = Page(str(plot["svg"]))
    titles = [text for text in page.text if "iteration" in text]
    assert titles == [f"a <b>, iteration {at}: {value:.4g}" for at, value in enumerate(values, start=1)]
    places = [(float(use["x"] or ""), float(use["y"] or "")) for use in page.named("use")]
    assert all(0 <= x <= 360 and 0 <= y <= 170 for x, y in places)
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    # Higher values lie further up, so they have a smaller distance from the top.
    by_height = sorted(range(len(values)), key=lambda index: -places[index][1])
    assert [values[index] for index in by_height] == sorted(values)
    numbers = [float(text) for text in page.text if re.fullmatch(r"-?[\d.]+(e[+-]\d+)?", text)]
    assert numbers[-len(ticks) :] == pytest.approx(ticks)


def test_colours_are_those_of_the_page_and_long_lines_have_one_marker() -> None:
    plot = line_plot("t", "m", {"a": [(x, float(x)) for x in range(200)], "b": [(0, 1.0)]}, legend=True)
    assert plot is not None
    assert {"var(--s0)", "var(--s1)", "var(--soft)"} <= set(re.findall(r"var\(--\w+\)", plot["svg"]))
    assert not re.findall(r"#[0-9a-f]{6}\b", plot["svg"])
    assert len(Page(str(plot["svg"])).named("use")) == 2
    assert line_plot("t", "m", {"a": []}) is None


def test_a_rescoring_counts_as_numpy_does() -> None:
    before, after = np.random.default_rng(1).normal(size=(2, 300))
    plots = [
        plot_joint(before, after),
        plot_distribution(np.histogram(before, 40), "a", series=0),
        plot_distribution(np.histogram(after, 40), "b", series=1),
    ]
    said = [text for plot in plots for text in Page(str(plot)).text if "sample" in text and " to " in text]
    joint, rows, columns = np.histogram2d(before, after, bins=40)
    counts = [joint, *(np.histogram(side, 40)[0] for side in (before, after))]
    assert [int(text.split()[0]) for text in said] == [int(count) for side in counts for count in side.ravel() if count]
    i, j = np.argwhere(joint)[0]
    assert said[0].endswith(
        f"previous {rows[i]:.3f} to {rows[i + 1]:.3f}, later {columns[j]:.3f} to {columns[j + 1]:.3f}"
    )


@pytest.mark.slow
def test_matplotlib_is_imported_only_where_something_is_plotted() -> None:
    modules = "flows.command_line.main, flows.training.train, flows.inspection.inspect_run, flows.rescoring.rescore"
    command = f"import sys, {modules}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
