"""The size of a prompt's images, and its target: paired by name, index or column, complete, and of the same aspect."""

import hashlib
import io
import random
import struct
import threading
import zlib
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import ExifTags, Image

from grpo_core.errors import InputError
from grpo_core.rollouts.streams import ImageSize
from tasks.prompts.read import Prompt, read_prompts
from tasks.prompts.targets import TargetReference, load_target, pair_targets, read_sizes
from tests.tasks.stage_calls import png

OWN = ImageSize(64, 64)


def read(*rows: dict[str, Any]) -> tuple[ImageSize, ...]:
    prompts = [Prompt(f"id{row}", "a cat", columns) for row, columns in enumerate(rows)]
    return read_sizes(prompts, source="cats.csv", default=OWN)


@pytest.mark.parametrize(
    ("columns", "size"),
    [
        ({}, OWN),
        ({"note": "512x768"}, OWN),
        ({"width": None, "height": None, "size": None}, OWN),
        ({"width": " ", "height": "", "size": ""}, OWN),
        ({"width": 512, "height": 768}, (512, 768)),
        ({"width": 512.0, "height": "768"}, (512, 768)),
        ({"size": "512x768"}, (512, 768)),
        ({"size": " 512 X 768 "}, (512, 768)),
        ({"size": "512×768", "width": 512, "height": 768}, (512, 768)),
        ({"size": None, "width": 512, "height": 768}, (512, 768)),
    ],
)
def test_a_size_is_read(columns: dict[str, Any], size: tuple[int, int]) -> None:
    assert read({}, columns) == (OWN, size)


@pytest.mark.parametrize(
    ("columns", "column"),
    [
        *(({"size": value}, "size") for value in ("512 by 768", "512", 512, "0x64", "-64x64", "64x")),
        *(({"size": value}, "size") for value in ("64x64x64", "64.5x64", "1e3x64", [64, 64], True, "٦٤x64")),
        *(({"width": value, "height": 64}, "width") for value in (0, -64, 64.5, "64.0px", True)),
        *(({"width": value, "height": 64}, "width") for value in (float("nan"), float("inf"), 10**400)),
        ({"width": 64, "height": "tall"}, "height"),
        ({"width": 64}, "width"),
        ({"height": 64, "width": ""}, "height"),
        ({"width": 64, "height": 96, "size": "96x64"}, "size"),
    ],
)
def test_what_is_no_size_is_refused_with_its_row(columns: dict[str, Any], column: str) -> None:
    with pytest.raises(InputError) as caught:
        read({}, {"size": "64x64"}, columns)
    assert caught.value.place == f"data.prompts: cats.csv, row 3, column {column}"
    assert caught.value.value is columns[column]


def saved(image: Image.Image, path: Path, **options: object) -> TargetReference:
    image.save(path, **options)
    (reference,) = pair_targets(prompts("x"), folder=str(path.parent), column=None, base="")
    assert reference is not None
    return reference


def prompts(*names: object) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"id{row}", f"prompt {row}", {"target": name}) for row, name in enumerate(names, start=1))


def refusal(given: tuple[Prompt, ...], **options: str | None) -> InputError:
    with pytest.raises(InputError) as caught:
        pair_targets(given, **({"folder": None, "column": None, "base": ""} | options))
    return caught.value


def shades(references: tuple[TargetReference | None, ...]) -> list[object]:
    return [None if one is None else load_target(one).getpixel((0, 0))[0] for one in references]


class TestByIndex:
    @pytest.mark.parametrize(
        "form", ["{}.png", "{:06d}.png", "target-{}.PNG", "{}_512.webp", "{}-{}.png", "{1}{0}.png"]
    )
    @pytest.mark.parametrize("first", [0, 1])
    def test_images_pair_by_their_numbers(self, tmp_path: Path, form: str, first: int) -> None:
        order = list(range(12))
        random.Random(0).shuffle(order)
        for index in order:
            kind = "WEBP" if form.endswith("webp") else "PNG"
            buffer = io.BytesIO()
            Image.new("RGB", (8, 8), (index * 20,) * 3).save(buffer, kind, lossless=True)
            (tmp_path / form.format(index + first, "zyxwvutsrqpo"[index])).write_bytes(buffer.getvalue())
        for other in ("notes.txt", ".DS_Store", "._0.png"):
            (tmp_path / other).write_bytes(b"no image")
        (tmp_path / "folder.png").mkdir()
        paired = pair_targets(prompts(*range(12)), folder=str(tmp_path), column=None, base="elsewhere")
        assert shades(paired) == [index * 20 for index in range(12)]

    @pytest.mark.parametrize("held", [0, 2, 4])
    def test_other_numbers_are_refused_with_both(self, tmp_path: Path, held: int) -> None:
        for index in range(held):
            (tmp_path / f"{index}.png").write_bytes(png())
        error = refusal(prompts(1, 2, 3), folder=str(tmp_path))
        assert error.place == f"data.targets: {tmp_path}"
        assert {str(held), "3"} <= set(str(error.value).split())

    @pytest.mark.parametrize(
        "names",
        [
            ("red-circle", "blue-heart"),
            # No index: they begin elsewhere, have gaps, are the same twice, or are in some names only.
            *(("img_2001", "img_2002"), ("0", "2"), ("a1", "b1"), ("0", "00"), ("0", "one")),
            # One order by the first number, and another by the last.
            ("0_2", "1_1", "2_0"),
        ],
    )
    def test_names_without_an_index_are_refused(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        for name in names:
            (tmp_path / f"{name}.png").write_bytes(png())
        error = refusal(prompts(*names), folder=str(tmp_path))
        assert error.place == f"data.targets: {tmp_path}"
        assert error.value == ", ".join(sorted(f"{name}.png" for name in names))

    def test_one_image_for_one_prompt_needs_no_index(self, tmp_path: Path) -> None:
        (tmp_path / "red-circle.png").write_bytes(png(40))
        assert shades(pair_targets(prompts("x"), folder=str(tmp_path), column=None, base="")) == [40]

        for name in ("none", "red-circle.png"):
            error = refusal(prompts(1), folder=str(tmp_path / name))
            assert (error.place, error.value) == ("data.targets", str(tmp_path / name))


class TestByColumn:
    def test_names_are_relative_to_the_folder_or_else_to_the_prompt_file(self, tmp_path: Path) -> None:
        (tmp_path / "inner").mkdir()
        (tmp_path / "a.png").write_bytes(png(10))
        (tmp_path / "inner" / "a.png").write_bytes(png(20))
        given = prompts("a.png", None, "./inner/../a.png", "a.png")
        inside = pair_targets(given[:2], folder=str(tmp_path / "inner"), column="target", base=str(tmp_path))
        beside = pair_targets(given, folder=None, column="target", base=f"{tmp_path}/")
        assert shades(inside) == [20, None]
        assert shades(beside) == [10, None, 10, 10]
        assert beside[0].uri == f"{tmp_path}/a.png"
        assert shades(pair_targets(prompts("inner/a.png"), folder=None, column="target", base=str(tmp_path))) == [20]

    @pytest.mark.parametrize(
        "name",
        [
            # These lead out of the folder.
            *("../a.png", "x/../../a.png", "..", "/etc/a.png", "~/a.png", "s3://a/a.png", "memory://a.png", "a::b.png"),
            # These are no names of files, or not of images.
            *(7, "", "  ", ["a.png"], "a.gif", "a"),
        ],
    )
    def test_a_name_that_is_refused(self, tmp_path: Path, name: object) -> None:
        (tmp_path / "a.png").write_bytes(png())
        (tmp_path / "a").write_bytes(png())
        error = refusal(prompts(None, name), folder=str(tmp_path / "inner"), column="target")
        # A file that is not there, or no image, would be refused at the prompt and not at its column.
        assert (error.value, error.place) == (name, "data.targets: prompt id2 (row 2), column target")

    def test_a_missing_file_names_prompt_row_and_neighbours(self, tmp_path: Path) -> None:
        (tmp_path / "circle.png").write_bytes(png())
        error = refusal(prompts("circle.png", "circel.png"), folder=str(tmp_path), column="target")
        assert "prompt id2 (row 2)" in error.place
        assert error.hint.endswith("circle.png.")

        error = refusal(prompts("a.png"), column="image")
        assert (error.place, error.value, "target" in error.hint) == ("data.target_column", "image", True)
        assert pair_targets(prompts("a.png", "b.png"), folder=None, column=None, base="") == (None, None)


def test_a_folder_behind_a_url() -> None:
    fsspec.filesystem("memory").pipe({"/targets-url/0.bmp": png(40, kind="BMP"), "/targets-url/1.jpg": b"x"})
    error = refusal(prompts(1, 2), folder="memory://targets-url")
    assert "prompt id2 (row 2)" in error.place
    assert shades(pair_targets(prompts("0.bmp"), folder="memory://targets-url", column="target", base="")) == [40]
    assert shades(pair_targets(prompts("targets-url/0.bmp"), folder="memory://", column="target", base="")) == [40]


class CountedFileSystem(MemoryFileSystem):
    """Counts what it is asked; a file is answered for once as many are asked for at once."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[list[str]] = []
    at_once = threading.Barrier(8)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("counted://", "memory://")))

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        self.asked.append(path)
        self.at_once.wait(timeout=30)
        return bytes(super().cat_file(path, *arguments, **options))

    def info(self, path: str, **options: Any) -> Any:
        self.asked.append(f"info {path}")
        return super().info(path, **options)


def test_files_elsewhere_are_asked_for_once_and_several_at_once() -> None:
    fsspec.register_implementation("counted", CountedFileSystem, clobber=True)
    fsspec.filesystem("counted").pipe({f"/{shade}.png": png(shade) for shade in range(8)})
    CountedFileSystem.asked.clear()
    names = [f"{shade}.png" for shade in (*range(8), 3)]
    paired = pair_targets(prompts(*names), folder="counted://", column="target", base="")
    assert [each and each.uri for each in paired] == [f"counted://{name}" for name in names]
    assert [each and each.sha256 for each in paired] == [
        hashlib.sha256(png(int(name[0]))).hexdigest() for name in names
    ]
    assert sorted(CountedFileSystem.asked) == [f"/{shade}.png" for shade in range(8)]


def header_only_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


NOISE = io.BytesIO()
Image.effect_noise((64, 64), 50).save(NOISE, "JPEG")
EARLY_END = NOISE.getvalue()[:600]


class TestRefused:
    @pytest.mark.parametrize(
        "content",
        [b"a red circle", png(kind="GIF"), png()[:60] + b"\xff" * 9, EARLY_END],
        ids=["text", "GIF", "a damaged PNG", "a cut JPEG"],
    )
    def test_what_is_no_image(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "0.png").write_bytes(content)
        error = refusal(prompts(1), folder=str(tmp_path))
        assert (error.place, error.value) == ("data.targets: prompt id1 (row 1)", f"{tmp_path}/0.png")

    def test_more_pixels_than_the_bound(self, tmp_path: Path) -> None:
        (tmp_path / "0.png").write_bytes(header_only_png(8192, 8192))
        assert pair_targets(prompts("x"), folder=str(tmp_path), column=None, base="")[0] is not None
        (tmp_path / "0.png").write_bytes(header_only_png(8193, 8192))
        assert "prompt id1 (row 1)" in refusal(prompts(1), folder=str(tmp_path)).place

    def test_a_changed_file(self, tmp_path: Path) -> None:
        path = tmp_path / "0.bmp"
        reference = saved(Image.new("RGB", (8, 8)), path)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            load_target(reference)
        assert str(caught.value.value).startswith("sha256 ")
        path.write_bytes(EARLY_END)
        cut = TargetReference(str(path), hashlib.sha256(EARLY_END).hexdigest())
        with pytest.raises(InputError, match="not a complete image"):
            load_target(cut)
        path.unlink()
        with pytest.raises(InputError) as caught:
            load_target(reference)
        assert (caught.value.place, caught.value.value) == ("data.targets", str(path))


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_target_of_another_aspect_is_refused_when_it_is_paired(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    size = (48, 32) if orientation == 1 else (32, 48)  # six: the image lies on its side in the file
    Image.new("RGB", size).save(tmp_path / "0.jpg", "JPEG", exif=exif)
    assert len(pair_targets(prompts("x"), folder=str(tmp_path), column=None, base="", sizes=[(480, 320)])) == 1
    with pytest.raises(InputError) as caught:
        pair_targets(prompts("x"), folder=str(tmp_path), column=None, base="", sizes=[(320, 480)])
    assert caught.value.value == "target of 48x32 pixels"


def test_images_beside_captions_belong_to_those_of_their_name(tmp_path: Path) -> None:
    """Numbers in the names do not decide: here they are those of the other caption."""
    for shade, (caption, image) in enumerate((("a cat", "b1.png"), ("a dog", "a0.jpg"), ("a bird", "c.v2.png"))):
        (tmp_path / image).with_suffix(".txt").write_text(caption)
        (tmp_path / image).write_bytes(png(shade))
    (tmp_path / "without-a-caption.png").write_bytes(png(9))
    prompts = read_prompts(tmp_path).prompts

    def paired() -> dict[str, str]:
        references = pair_targets(prompts, folder=str(tmp_path), column=None, base="")
        return {prompt.text: Path(each.uri).name for prompt, each in zip(prompts, references, strict=True) if each}

    assert paired() == {"a cat": "b1.png", "a dog": "a0.jpg", "a bird": "c.v2.png"}
    (tmp_path / "a0.png").write_bytes(png(1))
    with pytest.raises(InputError, match=r"a0\.jpg, a0\.png"):
        paired()
    (tmp_path / "a0.png").unlink()
    (tmp_path / "b1.png").unlink()
    with pytest.raises(InputError, match="no image b1"):
        paired()
