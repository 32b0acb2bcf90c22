import hashlib
from pathlib import Path

from PIL import Image

from tasks.reports.target_reader import TargetReader
from tests.tasks.reports.made_runs import png


def test_targets_are_verified(tmp_path: Path) -> None:
    kept, gone, changed, broken = (tmp_path / name for name in ("kept.png", "gone.png", "changed.png", "broken.png"))
    for path in (kept, gone, changed):
        path.write_bytes(png((1, 2, 3)))
    broken.write_bytes(b"no image")
    known = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in (kept, gone, changed, broken)}
    gone.unlink()
    changed.write_bytes(png((9, 9, 9)))
    targets = TargetReader(320)
    found = {path.name: targets.read(str(path), sha256) for path, sha256 in known.items()}
    target = found.pop("kept.png")
    assert target is not None
    assert target.getpixel((0, 0)) == (1, 2, 3)
    assert set(found.values()) == {None}
    assert set(targets.missing) == {str(gone), str(changed), str(broken)}
    assert "not the file" in targets.missing[str(changed)]


def test_where_no_target_is_named_none_is_missing() -> None:
    targets = TargetReader(320)
    assert targets.read(None, None) is None
    assert targets.missing == {}


def test_a_large_transparent_target_lies_over_white_and_is_made_smaller(tmp_path: Path) -> None:
    place = tmp_path / "large.png"
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(place)
    read = TargetReader(16).read(str(place), hashlib.sha256(place.read_bytes()).hexdigest())
    assert read is not None
    assert (read.size, read.mode, read.getpixel((0, 0))) == ((16, 16), "RGB", (255, 255, 255))
