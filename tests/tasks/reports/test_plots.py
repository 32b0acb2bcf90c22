import base64
import hashlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.reports.fonts import fonts_for
from tasks.reports.images import PromptImages, fitted, image_uri, read_images, shrunk
from tasks.reports.plots import normalised, plot_distribution, plot_guardrails, plot_joint, plot_label
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.reports.made_runs import RunMaker, colour, png
from tests.tasks.reports.test_run_page import Page


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
    modules = "flows.command_line.main, flows.training.train, flows.inspect_run, flows.rescoring.rescore"
    command = f"import sys, {modules}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_labels_are_text_and_nothing_else() -> None:
    fonts = fonts_for(["报"], system=[])
    assert plot_label("a$b$", fonts) == r"a\$b\$"
    assert plot_label("a 报\n", fonts) == "a [U+62A5]"
    assert plot_label("a" * 40 + "z", fonts, 10) == "aaaaaa…aaz"


def test_two_labels_that_are_shortened_to_one_have_a_line_each() -> None:
    twice, once = (
        plot_guardrails([0, 1], [0.1, 0.2], {f"{'a' * 40}{letter}{'b' * 40}": [1.0, 2.0] for letter in letters})
        for letters in ("xy", "x")
    )
    assert twice != once


def test_guardrails_are_multiples_of_their_first_value() -> None:
    assert normalised([None, 4.0, None, 2.0, 8.0]) == [None, 1.0, None, 0.5, 2.0]
    assert normalised([-2.0, -1.0]) == [1.0, 0.5]
    assert normalised([0.0, 1.0]) is None
    assert normalised([None, None]) is None


def test_the_image_depends_on_what_was_measured() -> None:
    contents = []
    for last in (0.5, 0.5, 2.0):
        guardrails = {"sharpness": [1.0, None, last], "$zero": [0.0, 0.0, 1.0], "_none": [None] * 3}
        contents.append(plot_guardrails([0, 1, 2], [0.1, 0.2, None], guardrails))
    assert contents[0] == contents[1] != contents[2]
    with Image.open(io.BytesIO(contents[0])) as image:
        # Nor on what made it.
        assert not image.text  # type: ignore[attr-defined]


@pytest.mark.parametrize("rewards", [[0.5], [None]])
def test_a_single_version_without_guardrails(rewards: list[float | None]) -> None:
    with Image.open(io.BytesIO(plot_guardrails([3], rewards, {}))) as image:
        assert image.width > 600


def plain(rgb: tuple[int, int, int], width: int = 8, height: int = 8) -> Image.Image:
    return Image.new("RGB", (width, height), rgb)


def test_images_are_found_by_their_samples_name(tmp_path: Path) -> None:
    maker = RunMaker(tmp_path)
    maker.rollouts("iteration_000001", "i000001")
    wanted = ["i000001.p0001.s02", "i000001.p0000.s01", "i000001.p0009.s00"]
    found = read_images(maker.folder / "iteration_000001/rollouts", wanted)
    assert {name: image.getpixel((3, 3)) for name, image in found.items()} == {
        "i000001.p0001.s02": colour(1, 2),
        "i000001.p0000.s01": colour(0, 1),
    }


def test_small_images_grow_by_whole_pixels_and_large_ones_are_averaged() -> None:
    two = plain((0, 0, 0), 2, 1)
    two.putpixel((1, 0), (255, 255, 255))
    grown = fitted(two, 8)
    assert grown.size == (8, 4)
    assert {grown.getpixel((x, 2)) for x in range(4)} == {(0, 0, 0)}
    assert {grown.getpixel((x, 2)) for x in range(4, 8)} == {(255, 255, 255)}
    stripes = plain((0, 0, 0), 200, 100)
    stripes.paste((255, 255, 255), (0, 0, 200, 50))
    small = fitted(stripes, 20)
    assert small.size == (20, 10)
    assert small.getpixel((10, 1)) == (255, 255, 255)
    assert small.getpixel((10, 8)) == (0, 0, 0)


@pytest.mark.parametrize(("size", "expected"), [((400, 100), (40, 10)), ((30, 20), (30, 20)), ((2000, 1), (40, 1))])
def test_shrinking_keeps_the_shape_and_the_given_image(size: tuple[int, int], expected: tuple[int, int]) -> None:
    image = plain((9, 8, 7), *size)
    assert shrunk(image, 40).size == expected
    assert image.size == size


@pytest.mark.parametrize(("side", "lossless_side", "exact"), [(64, 128, True), (64, 0, False), (300, 128, False)])
def test_small_images_are_lossless_and_photographs_are_not(side: int, lossless_side: int, exact: bool) -> None:
    image = Image.effect_noise((side, side), 90).convert("RGB")
    uri = image_uri(image, lossless_side=lossless_side)
    with Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1]))) as embedded:
        assert (embedded.format, embedded.size) == ("WEBP", image.size)
        assert (embedded.convert("RGB").tobytes() == image.tobytes()) == exact


def test_targets_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept, gone, changed, broken = (Path(name) for name in ("kept.png", "gone.png", "changed.png", "broken.png"))
    for path in (kept, gone, changed):
        path.write_bytes(png((1, 2, 3)))
    broken.write_bytes(b"no image")
    known = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in (kept, gone, changed, broken)}
    gone.unlink()
    changed.write_bytes(png((9, 9, 9)))
    targets = PromptImages(320)
    found = {path.name: targets.target(str(path), sha256) for path, sha256 in known.items()}
    target = found.pop("kept.png")
    assert target is not None
    assert target.getpixel((0, 0)) == (1, 2, 3)
    assert set(found.values()) == {None}
    assert set(targets.missing) == {str(gone), str(changed), str(broken)}
    assert known[changed] in targets.missing[str(changed)]
    assert targets.target(None, None) is None
    assert len(targets.missing) == 3


def test_relative_targets_are_looked_for_beside_the_storage_root(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "runs"), "tiny")
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "0.png").write_bytes(png((1, 2, 3)))
    known = hashlib.sha256(png((1, 2, 3))).hexdigest()
    targets = PromptImages(320, store)
    assert targets.target("targets/0.png", known) is not None
    assert targets.target("targets/1.png", known) is None
    assert list(targets.missing) == ["targets/1.png"]


def test_a_large_transparent_target_lies_over_white_and_is_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = Path("large.png")
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(place)
    read = PromptImages(16).target(str(place), hashlib.sha256(place.read_bytes()).hexdigest())
    assert read is not None
    assert (read.size, read.mode, read.getpixel((0, 0))) == ((16, 16), "RGB", (255, 255, 255))
