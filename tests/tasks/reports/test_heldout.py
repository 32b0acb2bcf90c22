from pathlib import Path
from typing import Any

from PIL import Image

from tasks.reports.heldout import contact_sheet, write_contact_sheet, write_heldout_texts
from tasks.reports.samples import Row
from tasks.storage.artifacts.reference import ArtifactRef
from tests.tasks.reports.made_runs import RunMaker, colour, png

TARGET = (250, 1, 1)


def evaluated(root: Path, **options: Any) -> tuple[RunMaker, ArtifactRef, ArtifactRef]:
    maker = RunMaker(root, **options)
    if not maker.texts:
        (root / "target.png").write_bytes(png(TARGET))
        maker.targets = {0: root / "target.png"}
    sides = []
    for version, shift in ((0, 0.0), (2, 0.25)):
        maker.evaluation(version, shift=shift)
        scored = maker.store.find(f"evaluations/{version:06d}/advantages")
        assert scored is not None
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


def test_a_sheet_without_targets_has_no_column_for_them_and_marks_deleted_images() -> None:
    def row(image: Image.Image | None) -> Row:
        return {"prompt": "word " * 100, "reward": 0.1, "image": image}

    sheet = contact_sheet([([row(None)], [row(Image.new("RGB", (64, 64), TARGET))])] * 3, title="t", side=50)
    assert sheet.size == (230 + 56 + 18 + 56 + 6, 52 + 3 * 56 + 6)
    assert sheet.getpixel((230 + 56 + 18 + 25, 52 + 2 * 56 + 25)) == TARGET
    assert sheet.crop((230, 52, 280, 102)).getcolors(1 << 20)[1:]
