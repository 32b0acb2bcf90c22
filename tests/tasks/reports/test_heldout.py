from pathlib import Path
from typing import Any

from PIL import Image

from tasks.reports.heldout import write_contact_sheet, write_heldout_texts
from tasks.storage.artifacts.reference import ArtifactRef
from tests.tasks.reports.made_runs import RunMaker, colour


def evaluated(root: Path, **options: Any) -> tuple[RunMaker, ArtifactRef, ArtifactRef]:
    maker = RunMaker(root, **options)
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


def test_a_sheet_of_images(tmp_path: Path) -> None:
    maker, before, after = evaluated(tmp_path)
    place = Path(write_contact_sheet(maker.store, before, after, "r: held-out prompts"))
    assert place == maker.folder / "contact_sheet.png"
    sheet = Image.open(place).convert("RGB")
    assert sheet.size == (230 + 8 * 102 + 2 * 18 + 6 - 18, 52 + 2 * 102 + 6)
    for group in range(2):
        for sibling in range(4):
            pixel = 230 + sibling * 102 + 40, 52 + group * 102 + 40
            assert sheet.getpixel(pixel) == colour(group, sibling)
