"""What configs/smollm2_sums.yaml learns: picture and answers of README.md, and the table of docs/performance.md."""

import tempfile

import polars as pl

from grpo_core.rollouts.messages import read_messages
from tasks.process import CHECKOUT
from tasks.reports.text import in_cell, markdown_table, one_line
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tests.bench.page import write_results
from tests.bench.released import MODEL
from tests.bench.sick_runs import draw_panels

PLOTTED = ("reward", "heldout_reward", "completions/mean_length")
ASKED = 3


def table(name: str) -> list[str]:
    """Train once, write the picture and the README's answers, and return the rewards by iteration."""
    from flows import train
    from tasks.runs.frames import open_run
    from tasks.runs.lookup import find_run

    model = {"policy.model": str(MODEL)} if MODEL.is_dir() else {}
    with tempfile.TemporaryDirectory() as root:
        train(f"configs/{name}.yaml", overrides={**model, "run.name": name, "storage.root": root}, progress=False)
        samples, run = open_run(name, root=root).heldout(), read_run(RunReader(find_run(name, root)))
    title, note = "SmolLM2-135M-Instruct learns to answer sums", "over iterations; the reward is 1 for the right sum"
    picture = draw_panels(title, note, PLOTTED, {name: (run, "#2563eb")})
    (CHECKOUT / "docs" / f"{name}.png").write_bytes(picture)
    write_results(f"{name}_answers", _answers(samples))
    rewards = {int(place): f"{value:.3f}" for place, value in run.series("reward")}
    heldout = {int(version): f"{value:.3f}" for version, value in run.heldout_series()}
    rows = [
        ("mean reward of 32 answers", "", *rewards.values()),
        ("mean of 64 answers to held-out sums", *(heldout.get(place, "") for place in (0, *rewards))),
    ]
    return markdown_table(("iteration", "before", *map(str, rewards)), rows)


def _answers(samples: pl.DataFrame) -> list[str]:
    """Show the first answers to the first held-out prompts, before and after training."""
    first, last = (
        samples.filter(policy_version=version).unique("prompt", keep="first", maintain_order=True).head(ASKED)
        for version in (samples["policy_version"].min(), samples["policy_version"].max())
    )
    rows = [
        ((read_messages(prompt) or [])[-1]["content"], *(in_cell(one_line(text, 100)) for text in texts))
        for prompt, *texts in zip(first["prompt"], first["completion"], last["completion"], strict=True)
    ]
    return markdown_table(("held-out", "before", "after"), rows)
