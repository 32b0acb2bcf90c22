import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from PIL import Image

from grpo_core.rollouts.messages import write_messages
from tasks.reports import heldout
from tasks.reports.groups import Row
from tasks.reports.heldout import HEAD, MAX_SHEET_ROWS, Sides, contact_sheet, write_contact_sheet, write_heldout_texts
from tasks.reports.iteration import IterationRecord, iteration_markdown, iteration_table
from tasks.runs.layout import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef
from tests.tasks.reports.made_runs import RunMaker, colour, png

EVIL = "a | b\n\n# head\n<script>x</script> ![i](http://x) `c`\r| d |"
PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def record_of(maker: RunMaker, iteration: int = 1, rounds: int = 1) -> IterationRecord:
    maker.iteration(iteration, rounds=rounds)
    place = f"iteration_{iteration:06d}"
    folders = [place if draw == 1 else f"{place}/round_{draw:02d}" for draw in range(1, rounds + 1)]
    find = maker.store.find
    scored = tuple(
        SamplingRound(find(f"{folder}/rollouts"), {label: find(f"{folder}/rewards/{label}") for label in maker.labels})
        for folder in folders
    )
    advantages = find(f"{folders[-1]}/advantages")
    return IterationRecord(iteration, scored, advantages, {**advantages.metrics, "kl": 0.25})


def rows(markdown: str, header: str) -> list[list[str]]:
    """Cells of the table that begins with this header, as a Markdown reader splits them."""
    lines = markdown.split("\n")
    start = next(index for index, line in enumerate(lines) if line.startswith(header)) + 2
    table = lines[start : next(index for index in range(start, len(lines)) if not lines[index].startswith("|"))]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def test_images_of_all_rounds_are_ranked_with_a_column_for_each_reward(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, labels=("ssim", "psnr"))
    markdown = iteration_markdown(maker.store, "r", [record_of(maker, rounds=2)])
    best = rows(markdown, "| image | reward | ssim | psnr | prompt | sample |")
    assert [cells[1] for cells in best] == ["**0.900**", "**0.900**", "**0.500**", "**0.500**"]
    assert best[0][2:] == ["0.900", "0.900", "a red square", "`i000001.p0000.s02`"]
    assert best[1][-1] == "`i000001.d02.p0000.s02`"
    worst = rows(markdown.split("## Worst")[1], "| image")
    assert [cells[1] for cells in worst] == ["**0.100**", "**0.100**", "**0.500**", "**0.500**"]
    for cells in best:
        assert cells[0].startswith(f"![{cells[-1][1:-1]}](data:image/webp;base64,")
    assert "dataset" not in markdown
    for label in maker.labels:
        assert f"iteration_000001/rewards/{label}`" in markdown


def test_rewards_over_iterations_and_a_row_per_metric(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    markdown = iteration_markdown(maker.store, "r", [record_of(maker)], heldout=[0.25, 0.5, 1.0])
    table = {cells[0]: cells[1:] for cells in rows(markdown, "| over iterations")}
    assert table["held-out reward"] == ["▁▃█", "0.250 → 1.000 (+0.750)"]
    record = record_of(RunMaker(tmp_path, "second"))
    table = iteration_table(IterationRecord(1, record.rounds, record.advantages, {"b": 1 / 3, "a": 2.0}))
    assert table == [{"metric": "a", "value": 2.0}, {"metric": "b", "value": 0.333333}]


def test_the_best_and_the_worst_are_of_different_prompts(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, prompts=tuple(f"prompt {index}" for index in range(5)))
    markdown = iteration_markdown(maker.store, "r", [record_of(maker)])
    best, worst = (rows(part, "| image | reward") for part in markdown.split("## Worst"))
    # Of the first prompt .9, .4 and .1, of the four others .5 each.
    assert [cells[1] for cells in best] == ["**0.900**", "**0.500**", "**0.500**", "**0.500**"]
    assert [cells[1] for cells in worst] == ["**0.100**", "**0.500**", "**0.500**", "**0.500**"]
    for cells in (best, worst):
        assert len({prompt for *_, prompt, _ in cells}) == 4


def test_token_samples_are_ranked_and_both_streams_are_in_the_table(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path, streams=("tokens", "denoising"))
    markdown = iteration_markdown(maker.store, "r", [record_of(maker)])
    best = rows(markdown, "| image | reward")
    # Two of either prompt.
    assert [cells[1] for cells in best] == ["**0.900**", "**0.500**", "**0.500**", "**0.400**"]
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
        "**0.100** (ssim 0.100) (truncated): answer 1 of group 0",
        "",
    ]
    assert second[1] == "**0.500** (ssim 0.500): answer 0 of group 1"


TALK = write_messages([{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?", "name": None}])


def test_a_conversation_is_shown_as_its_texts(tmp_path: Path) -> None:
    maker, before, after = evaluated(tmp_path, modality="text", prompts=(TALK, "plain"))
    written = Path(write_heldout_texts(maker.store, before, after, "")).read_text()
    assert "system: be brief\nuser: 2+2?\n" in written
    maker = RunMaker(tmp_path / "iterations", modality="text", prompts=(TALK, "plain"))
    markdown = iteration_markdown(maker.store, "r", [record_of(maker)])
    assert [cells[0] for cells in rows(markdown, "| prompt | best | worst |")] == ["2+2?", "plain"]
    assert "role" not in written + markdown


@pytest.mark.parametrize("modality", ["image", "text"])
def test_no_prompt_or_completion_breaks_out_of_its_cell(tmp_path: Path, modality: str) -> None:
    maker = RunMaker(tmp_path, modality=modality, prompts=(EVIL, "plain"), datasets=(EVIL, "other"))
    maker.written = {(0, 2): EVIL, (0, 1): "", (1, 0): EVIL * 100}
    markdown = iteration_markdown(maker.store, "r", [record_of(maker)])
    header = "| image | reward | ssim | prompt | dataset | sample |" if modality == "image" else "| prompt | dataset |"
    width = header.count("|") - 1 if modality == "image" else 5
    for cells in rows(markdown, header):
        assert len(cells) == width
    assert len(re.findall("^#", markdown, re.MULTILINE)) == (3 if modality == "image" else 2)
    inline = [child for token in PARSER.parse(markdown) for child in token.children or []]
    assert not {"html_inline", "link_open", "s_open"} & {child.type for child in inline}
    assert all(str(child.attrs["src"]).startswith("data:image/") for child in inline if child.type == "image")
    shown = "".join(child.content for child in inline)
    assert "a | b ⏎  ⏎ # head ⏎ <script>x</script> ![i](http://x) `c`" in shown
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
    metrics = dict(rows(markdown, "| metric | value |"))
    assert metrics["groups dropped"] == "2"
    assert metrics["sampling rounds"] == "2"
    assert (metrics["sums: reward"], metrics["poems: reward"]) == ("0.5", "0.6")
    table = rows(markdown, "| prompt | dataset | best | worst |")
    assert [(cells[1], cells[-1]) for cells in table] == [("sums", ""), ("poems", "dropped")] * 2
    assert "iteration_000001/round_02/rollouts" in markdown
    assert "iteration_000001/round_02/advantages" in markdown


TARGET = (250, 1, 1)


def evaluated(
    root: Path, *, sources: Mapping[int, list[bytes]] | None = None, **options: Any
) -> tuple[RunMaker, ArtifactRef, ArtifactRef]:
    maker = RunMaker(root, **options)
    maker.sources = dict(sources or {})
    if not maker.texts:
        (root / "target.png").write_bytes(png(TARGET))
        maker.targets = {0: root / "target.png"}
    sides = []
    for version, shift in ((0, 0.0), (2, 0.25)):
        maker.evaluation(version, shift=shift)
        scored = maker.store.find(f"evaluations/{version:06d}/advantages")
        sides.append(scored)
        maker.written = {(0, 0): "better\n````\nfence"}
    return maker, sides[0], sides[1]


def test_full_texts_before_and_after_under_their_prompt(tmp_path: Path) -> None:
    maker, before, after = evaluated(tmp_path, modality="text", prompts=("what is\n# this", "a blue square"))
    place = Path(write_heldout_texts(maker.store, before, after, "r: held-out prompts"))
    assert place == maker.folder / "heldout.md"
    first, second, third = place.read_text().split("\n## ")
    # Rewards 0.4, 0.1, 0.9 of the first prompt and 0.5 of the second's three samples.
    assert "Mean reward 0.483 → 0.733 (+0.250)" in first
    assert second.startswith("Prompt 1: reward 0.467 → 0.717 (+0.250)\n\n```text\nwhat is\n# this\n```\n")
    assert "Before training, reward 0.900\n\n```text\nanswer 2 of group 0\n```" in second
    assert "After training, reward 0.650\n\n`````text\nbetter\n````\nfence\n`````" in second
    assert second.index("Before training, reward none") < second.index("After training, reward 0.650")
    assert "of group 1" not in second
    # The second sibling of each prompt, on both sides.
    assert second.count("(truncated)\n\n```text\nanswer 1 of group 0") == second.count("(truncated)") == 2
    assert third.count("of group 1") == 8


def test_a_sheet_has_target_before_and_after_in_this_order(tmp_path: Path) -> None:
    maker, before, after = evaluated(tmp_path)
    place = Path(write_contact_sheet(maker.store, before, after, "r: held-out prompts"))
    assert place == maker.folder / "contact_sheet.png"
    sheet = Image.open(place).convert("RGB")
    assert sheet.size == (230 + 114 + 8 * 102 + 18 + 6, 52 + 2 * 102 + 6)
    assert sheet.getpixel((230 + 40, 52 + 40)) == TARGET
    for group in range(2):
        for sibling in range(4):
            for start in (230 + 114, 230 + 114 + 4 * 102 + 18):
                pixel = start + sibling * 102 + 40, 52 + group * 102 + 40
                assert sheet.getpixel(pixel) == colour(group, sibling)


def test_large_images_of_a_sheet_wait_in_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, real = set[tuple[int, int]](), contact_sheet

    def noted(pairs: Sequence[Sides], **options: Any) -> Image.Image:
        sizes.update(row["image"].size for pair in pairs for rows in pair for row in rows)
        return real(pairs, **options)

    monkeypatch.setattr(heldout, "contact_sheet", noted)
    maker, before, after = evaluated(tmp_path, side=400)
    sheet = Image.open(write_contact_sheet(maker.store, before, after, "t")).convert("RGB")
    assert sizes == {(96, 96)}
    assert sheet.getpixel((230 + 114 + 40, 52 + 40)) == colour(0, 0)


SOURCES = ((3, 200, 3), (3, 3, 200))


OF_SECOND = {1: [png(each) for each in SOURCES]}
"""The second prompt has two images."""


def test_a_sheet_has_the_images_of_prompts_in_front(tmp_path: Path) -> None:
    maker, before, after = evaluated(tmp_path, sources=OF_SECOND)
    sheet = Image.open(write_contact_sheet(maker.store, before, after, "t")).convert("RGB")
    first = 230 + 2 * 102 + 12
    assert sheet.size == (first + 114 + 8 * 102 + 18 + 6, 52 + 2 * 102 + 6)
    assert sheet.getpixel((first + 40, 52 + 40)) == TARGET
    for place, expected in enumerate(SOURCES):
        assert sheet.getpixel((230 + place * 102 + 40, 52 + 102 + 40)) == expected
        assert sheet.getpixel((230 + place * 102 + 40, 52 + 40)) == (238, 240, 243)
    assert sheet.getpixel((first + 114 + 40, 52 + 102 + 40)) == colour(1, 0)


def test_images_of_prompts_stand_in_front_of_texts_and_images(tmp_path: Path) -> None:
    for modality, first in (("image", 4), ("text", 1)):
        maker = RunMaker(tmp_path / modality, modality=modality)
        maker.sources = OF_SECOND
        markdown = iteration_markdown(maker.store, "r", [record_of(maker)])
        header = "| source | image | reward | ssim | prompt | sample |" if first == 4 else "| prompt | best | worst |"
        cells = [cells[0] for cells in rows(markdown, header)]
        shown = [cell.count("![source](data:image/") for cell in cells]
        assert sorted(set(shown)) == [0, 2]
        assert len(cells) == (4 if first == 4 else 2)
    maker, before, after = evaluated(tmp_path, sources=OF_SECOND, modality="text")
    one, two = Path(write_heldout_texts(maker.store, before, after, "t")).read_text().split("\n## ")[1:]
    assert (one.count("![source]"), two.count("![source]")) == (0, 2)


def test_a_sheet_of_many_prompts_has_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heldout, "MAX_SHEET_ROWS", 1)
    maker, before, after = evaluated(tmp_path, sources=OF_SECOND)
    sheet = Image.open(write_contact_sheet(maker.store, before, after, "t")).convert("RGB")
    assert sheet.size == (230 + 114 + 8 * 102 + 18 + 6, 52 + 102 + 6)
    assert sheet.getpixel((230 + 114 + 40, 52 + 40)) == colour(0, 0)
    monkeypatch.undo()
    image = Image.new("RGB", (8, 8), TARGET)
    row: Row = {"prompt": "a", "reward": 0.1, "image": image, "source_images": [image] * 20, "target_uri": None}
    widest = contact_sheet([([row] * 99, [row] * 99)], title="t")
    assert widest.getpixel((widest.width - 50, HEAD + 40)) == TARGET
    # Pillow warns of larger ones, and refuses those of twice as many pixels.
    assert Image.MAX_IMAGE_PIXELS is not None
    assert widest.width * (HEAD + MAX_SHEET_ROWS * (widest.height - HEAD)) < Image.MAX_IMAGE_PIXELS


def test_a_sheet_without_targets_has_no_column_for_them_and_marks_deleted_images() -> None:
    def row(image: Image.Image | None) -> Row:
        return {"prompt": "word " * 100, "reward": 0.1, "image": image}

    sheet = contact_sheet([([row(None)], [row(Image.new("RGB", (64, 64), TARGET))])] * 3, title="t", side=200)
    assert sheet.size == (230 + 206 + 18 + 206 + 6, 52 + 3 * 206 + 6)
    assert sheet.getpixel((230 + 206 + 18 + 100, 52 + 2 * 206 + 100)) == TARGET
    assert sheet.crop((230, 52, 430, 252)).getcolors(1 << 20)[1:]
    # Its heading is wider than a small image.
    small = contact_sheet([([row(None)], [row(None)])], title="t", side=50)
    assert small.crop((small.width - 6, 0, small.width, HEAD)).getcolors() == [(6 * HEAD, (238, 240, 243))]
