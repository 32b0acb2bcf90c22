import re
from html import unescape
from pathlib import Path

import pytest

from tasks.reports.iteration import IterationRecord, iteration_markdown, iteration_table
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef
from tests.tasks.reports.made_runs import RunMaker

EVIL = "a | b\n\n# head\n<script>x</script> ![i](http://x) `c`\r| d |"


def record_of(maker: RunMaker, iteration: int = 1, rounds: int = 1) -> IterationRecord:
    """Give the record that the flow makes, with the artifacts of every round."""
    maker.iteration(iteration, rounds=rounds)
    place = f"iteration_{iteration:06d}"
    folders = [place if draw == 1 else f"{place}/round_{draw:02d}" for draw in range(1, rounds + 1)]

    def found(place: str) -> ArtifactRef:
        reference = maker.store.find(place)
        assert reference is not None
        return reference

    scored = tuple(
        SamplingRound(
            found(f"{folder}/rollouts"),
            {label: found(f"{folder}/rewards/{label}") for label in maker.labels},
        )
        for folder in folders
    )
    advantages = found(f"{folders[-1]}/advantages")
    return IterationRecord(iteration, scored, advantages, {**advantages.metrics, "kl": 0.25})


def rows(markdown: str, header: str) -> list[list[str]]:
    """Cells of the table that begins with this header, as a Markdown reader splits them."""
    lines = markdown.split("\n")
    start = next(index for index, line in enumerate(lines) if line.startswith(header)) + 2
    table = lines[start : next(index for index in range(start, len(lines)) if not lines[index].startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_images_of_all_rounds_are_ranked_with_a_column_for_each_reward(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, labels=("ssim", "psnr"))
    markdown = iteration_markdown(maker.store, "r", [record_of(maker, rounds=2)])
    best = rows(markdown, "| image | reward | ssim | psnr | prompt | sample |")
    assert [cells[1] for cells in best] == ["**0.900**", "**0.900**", "**0.500**", "**0.500**"]
    assert best[0][2:] == ["0.900", "0.900", "a red square", "`i000001.p0000.s02`"]
    assert best[1][-1] == "`i000001.d02.p0000.s02`"
    worst = rows(markdown.split("## Worst")[1], "| image")
    assert [cells[1] for cells in worst] == ["**0.100**", "**0.100**", "**0.400**", "**0.400**"]
    for cells in best:
        assert cells[0].startswith(f"![{cells[-1][1:-1]}](data:image/png;base64,")
    assert "dataset" not in markdown
    for label in maker.labels:
        assert f"iteration_000001/rewards/{label}`" in markdown


def test_drafts_are_ranked_and_both_streams_are_in_the_table(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, streams=("tokens", "denoising"))
    markdown = iteration_markdown(maker.store, "r", [record_of(maker)])
    best = rows(markdown, "| image | reward")
    assert [cells[1] for cells in best] == ["**0.900**", "**0.500**", "**0.500**", "**0.500**"]
    assert "s03" not in markdown
    table = dict(rows(markdown, "| metric | value |"))
    assert (table["reward"], table["reward, denoising"]) == ("0.5", "0.25")


def test_each_prompts_best_and_worst_completion(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, modality="text")
    markdown = iteration_markdown(maker.store, "r", [record_of(maker)])
    first, second = rows(markdown, "| prompt | best | worst |")
    assert first == [
        "a red square",
        "**0.900** (ssim 0.900): answer 2 of group 0",
        "**0.100** (ssim 0.100): answer 1 of group 0",
        "",
    ]
    assert second[1] == "**0.500** (ssim 0.500): answer 0 of group 1"


@pytest.mark.parametrize("modality", ["image", "text"])
def test_no_prompt_or_completion_breaks_out_of_its_cell(tmp_path: Path, modality: str) -> None:
    maker = RunMaker(tmp_path, modality=modality, prompts=(EVIL, "plain"), datasets=(EVIL, "other"))
    maker.written = {(0, 2): EVIL, (0, 1): "", (1, 0): EVIL * 100}
    markdown = iteration_markdown(maker.store, "r", [record_of(maker)])
    header = "| image | reward | ssim | prompt | dataset | sample |" if modality == "image" else "| prompt | dataset |"
    width = header.count("|") - 1 if modality == "image" else 5
    for cells in rows(markdown, header):
        assert len(cells) == width
    assert "<" not in markdown
    assert "http:" not in markdown
    assert "`c`" not in markdown
    assert len(re.findall("^#", markdown, re.MULTILINE)) == (3 if modality == "image" else 2)
    assert "a | b ⏎  ⏎ # head ⏎ <script>x</script> ![i](http://x)" in unescape(markdown)
    assert ("*empty*" in markdown) == (modality == "text")


def test_long_texts_are_shortened_and_many_groups_counted(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, modality="text", prompts=tuple(f"prompt {index}" for index in range(11)))
    maker.written = {(0, 2): "begin" + "x" * 10_000 + "end"}
    markdown = iteration_markdown(maker.store, "r", [record_of(maker)])
    table = rows(markdown, "| prompt | best | worst |")
    assert len(table) == 8
    assert "The first 8 of 11 prompts." in markdown
    assert len(table[0][1]) < 600
    assert table[0][1].endswith("end")


def test_all_rounds_count_and_dropped_groups_are_marked(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, modality="text", datasets=("sums", "poems"))
    markdown = iteration_markdown(maker.store, "r", [record_of(maker, rounds=2)])
    metrics = dict(rows(unescape(markdown), "| metric | value |"))
    assert metrics["groups dropped"] == "2"
    assert metrics["sampling rounds"] == "2"
    assert (metrics["sums: reward"], metrics["poems: reward"]) == ("0.5", "0.6")
    table = rows(markdown, "| prompt | dataset | best | worst |")
    assert [(cells[1], cells[-1]) for cells in table] == [("sums", ""), ("poems", "dropped")] * 2
    assert "iteration_000001/round_02/rollouts" in markdown
    assert "iteration_000001/round_02/advantages" in markdown


def test_a_row_per_metric_with_six_digits(tmp_path: Path) -> None:
    record = record_of(RunMaker(tmp_path))
    table = iteration_table(IterationRecord(1, record.rounds, record.advantages, {"b": 1 / 3, "a": 2.0}))
    assert table == [{"metric": "a", "value": 2.0}, {"metric": "b", "value": 0.333333}]
