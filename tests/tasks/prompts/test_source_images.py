"""Images in prompts: read from every format, again from their place, and refused with the row where they are none."""

import base64
import csv
import gc
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import ExifTags, Image

from grpo_core.errors import InputError
from grpo_core.rollouts.images import SourceImage
from tasks.prompts.hub_datasets import DatasetChoice
from tasks.prompts.read import Prompt, PromptFile, read_prompts
from tasks.prompts.source_images import DECODED, SourceColumns
from tests.tasks.prompts.test_targets import header_only_png
from tests.tasks.stage_calls import Write, png

FOUND = SourceColumns()


def cut_jpeg() -> bytes:
    """Half a file: its header is complete."""
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(buffer, "JPEG")
    return buffer.getvalue()[: len(buffer.getvalue()) // 2]


def data_uri(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read(path: str | Path, images: SourceColumns | None = FOUND, **options: Any) -> PromptFile:
    return read_prompts(path, images=images, **options)


def named(prompts: tuple[Prompt, ...]) -> list[list[str]]:
    return [[source.digest for source in prompt.sources] for prompt in prompts]


def refusal(path: str | Path, images: SourceColumns | None = FOUND, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        read(path, images, **options)
    return caught.value


A, B = png(10), png(20, (4, 6), kind="JPEG")


@pytest.fixture
def folder(write: Write, tmp_path: Path) -> Path:
    """The images a.png and pictures/b.JPG, to which prompt files in the same folder refer."""
    (tmp_path / "pictures").mkdir()
    write("a.png", A)
    write("pictures/b.JPG", B)
    return tmp_path


ROWS: list[dict[str, Any]] = [
    {"prompt": "one", "images": "a.png", "answer": "x"},
    {"prompt": "two", "images": ["a.png", "./pictures/b.JPG"], "answer": "y"},
    {"prompt": "none", "images": None, "answer": "z"},
]
EXPECTED = [[digest(A)], [digest(A), digest(B)], []]


def as_jsonl(folder: Path) -> Path:
    path = folder / "set.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def as_csv(folder: Path, **form: Any) -> Path:
    path = folder / ("set.tsv" if form else "set.csv")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, **form)
        writer.writerow(ROWS[0])
        for row in ROWS:
            writer.writerow(json.dumps(value) if isinstance(value, list) else value for value in row.values())
    return path


def as_tsv(folder: Path) -> Path:
    return as_csv(folder, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None)


def as_data_uris(folder: Path) -> Path:
    uris = {"a.png": data_uri(A), "./pictures/b.JPG": data_uri(B, "jpeg")}
    path = folder / "set.json"
    images = [[uris[name] for name in names] for names in (["a.png"], ["a.png", "./pictures/b.JPG"], [])]
    filled = [{**row, "images": each} for row, each in zip(ROWS, images, strict=True)]
    path.write_text(json.dumps(filled))
    return path


KIND = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
CELLS = [[{"bytes": A, "path": None}], [{"bytes": A, "path": None}, {"bytes": None, "path": "pictures/b.JPG"}], []]


def as_parquet(folder: Path, images: list[Any] = CELLS, kind: pa.DataType | None = None) -> Path:
    table = pa.table(
        {
            "prompt": [row["prompt"] for row in ROWS],
            "images": pa.array(images, kind or pa.list_(KIND)),
            "answer": [row["answer"] for row in ROWS],
        }
    )
    pq.write_table(table, folder / "set.parquet", row_group_size=2)
    return folder / "set.parquet"


@pytest.mark.parametrize("written", [as_jsonl, as_csv, as_tsv, as_data_uris, as_parquet])
def test_every_format_names_the_same_images(folder: Path, written: Callable[[Path], Path]) -> None:
    file = read(written(folder))
    assert named(file.prompts) == EXPECTED
    assert file.source_columns == ("images",)
    assert [dict(prompt.columns) for prompt in file.prompts] == [{"answer": each} for each in "xyz"]
    assert [source.size for source in file.prompts[1].sources] == [(6, 4), (4, 6)]
    assert [source.load() for source in file.prompts[1].sources] == [A, B]
    # Names depend on the text and the images, not on how they are written.
    assert [prompt.prompt_id for prompt in file.prompts] == [
        prompt.prompt_id for prompt in read(as_jsonl(folder)).prompts
    ]


def test_one_bytes_column_of_parquet(folder: Path) -> None:
    file = read(as_parquet(folder, [A, B, None], pa.binary()))
    assert named(file.prompts) == [[digest(A)], [digest(B)], []]
    assert [source.load() for prompt in file.prompts for source in prompt.sources] == [A, B]


@pytest.mark.parametrize("streaming", [False, True])
def test_images_of_datasets(tmp_path: Path, streaming: bool) -> None:
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    cells = [{"bytes": A, "path": None}, None, {"bytes": B, "path": "b.jpg"}]
    made = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "image": cells}, features=features)
    (tmp_path / "set").mkdir()
    made.to_parquet(str(tmp_path / "set" / "train.parquet"))
    choice = DatasetChoice(split="train", streaming=streaming)
    file = read(str(tmp_path / "set"), choice=choice, limit=3 if streaming else None)
    assert named(file.prompts) == [[digest(A)], [], [digest(B)]]
    assert [source.load() for prompt in file.prompts for source in prompt.sources] == [A, B]


# `datasets` leaves the table of an image folder open; collected in a later test, it would warn there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_images_of_an_image_folder_and_of_no_other(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").write_bytes(A)
    (tmp_path / "set" / "metadata.csv").write_text("file_name,prompt\na.png,what is it\n")
    (prompt,) = read(str(tmp_path / "set"), choice=DatasetChoice(split="train")).prompts
    gc.collect()
    assert named((prompt,)) == [[digest(A)]]
    (tmp_path / "secret.png").write_bytes(B)
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    cell = {"bytes": None, "path": str(tmp_path / "secret.png")}
    made = pa.table({"prompt": ["a"], "image": pa.array([cell], KIND)}, schema=features.arrow_schema)
    (tmp_path / "other").mkdir()
    pq.write_table(made, tmp_path / "other" / "train.parquet")
    error = refusal(str(tmp_path / "other"), choice=DatasetChoice(split="train"))
    assert "leads out of the folder" in error.hint


class TestWhichColumns:
    def test_without_being_asked_an_image_column_is_a_column(self, folder: Path) -> None:
        (folder / "set.jsonl").write_text('{"prompt": "a <image>", "image": "nowhere.png"}')
        (prompt,) = read(folder / "set.jsonl", None).prompts
        assert (prompt.sources, dict(prompt.columns)) == ((), {"image": "nowhere.png"})
        (plain,) = read_prompts(as_one(folder, "a <image>")).prompts
        assert prompt.prompt_id == plain.prompt_id

    def test_another_column(self, folder: Path) -> None:
        (folder / "set.jsonl").write_text('{"prompt": "a", "source": "a.png", "image": "b"}')
        (prompt,) = read(folder / "set.jsonl", SourceColumns("source")).prompts
        assert (named((prompt,)), dict(prompt.columns)) == ([[digest(A)]], {"image": "b"})
        error = refusal(folder / "set.jsonl", SourceColumns("sources"))
        assert (error.place, error.value) == ("data.image_column", "sources")
        assert "source" in error.hint
        assert refusal(as_jsonl(folder), columns=["answer", "images"]).place == "data.columns"

    def test_either_of_two_columns_but_not_both_in_a_row(self, folder: Path) -> None:
        rows = '{"prompt": "a", "Image": "a.png", "images": []}\n{"prompt": "b", "Image": null, "images": ["a.png"]}'
        (folder / "set.jsonl").write_text(rows)
        assert named(read(folder / "set.jsonl").prompts) == [[digest(A)]] * 2
        (folder / "set.jsonl").write_text(rows + '\n{"prompt": "c", "Image": "a.png", "images": ["a.png"]}')
        error = refusal(folder / "set.jsonl")
        assert (error.place.rpartition(", ")[2], error.value) == ("line 3", "columns Image, images")

    def test_only_as_many_rows_as_are_used(self, folder: Path) -> None:
        rows = [{"prompt": "a", "image": "a.png"}, {"prompt": "b", "image": "missing.png"}]
        (folder / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
        assert named(read(folder / "set.jsonl", SourceColumns(limit=1)).prompts) == [[digest(A)], []]


def as_one(folder: Path, prompt: Any, **columns: Any) -> Path:
    (folder / "one.jsonl").write_text(json.dumps({"prompt": prompt, **columns}))
    return folder / "one.jsonl"


class TestNames:
    def test_depend_on_the_images_their_order_and_occurrence(self, folder: Path) -> None:
        found = [
            read(as_one(folder, "a", **({"images": images} if images else {}))).prompts[0].prompt_id
            for images in (["a.png"], ["pictures/b.JPG"], ["a.png", "pictures/b.JPG"], ["pictures/b.JPG", "a.png"], [])
        ]
        assert len(set(found)) == 5
        assert found[-1] == read_prompts(as_one(folder, "a")).prompts[0].prompt_id
        rows = [{"prompt": "a", "image": "a.png"}] * 2 + [{"prompt": "a", "image": "pictures/b.JPG"}]
        (folder / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
        first, second, third = (prompt.prompt_id for prompt in read(folder / "set.jsonl").prompts)
        assert len({first, second, third}) == 3
        assert first == read(as_one(folder, "a", image="a.png")).prompts[0].prompt_id
        assert third == read(as_one(folder, "a", image="pictures/b.JPG")).prompts[0].prompt_id


def blocks(*content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": [*content]}]


IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "what?"}


class TestMarks:
    @pytest.mark.parametrize(
        ("prompt", "images", "text"),
        [
            ("what?", ["a.png"], "what?"),
            ("what?", ["a.png", "a.png"], "what?"),
            ("<image> or <image>?", ["a.png", "a.png"], "<image> or <image>?"),
            (blocks(IMAGE, TEXT), ["a.png"], blocks(IMAGE, TEXT)),
            (blocks(TEXT), ["a.png"], blocks(TEXT)),
            # Arrow gives all structs of a column the same fields.
            (blocks(IMAGE | {"text": None}, TEXT), ["a.png"], blocks(IMAGE, TEXT)),
            (
                [{"role": "user", "content": "<image>a<image>"}, {"role": "assistant", "content": "b"}],
                ["a.png", "a.png"],
                [
                    {"role": "user", "content": [IMAGE, {"type": "text", "text": "a"}, IMAGE]},
                    {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
                ],
            ),
        ],
    )
    def test_as_many_as_images_or_none(self, folder: Path, prompt: Any, images: list[str], text: Any) -> None:
        (found,) = read(as_one(folder, prompt, images=images)).prompts
        assert (found.text if isinstance(text, str) else json.loads(found.text)) == text
        assert len(found.sources) == len(images)

    def test_messages_without_images_stay_to_the_letter(self, folder: Path) -> None:
        path = as_one(folder, [{"role": "user", "content": "what?"}])
        assert read(path).prompts == read_prompts(path).prompts

    @pytest.mark.parametrize(
        ("prompt", "images", "value"),
        [
            ("<image>?", ["a.png", "a.png"], "1 marks for 2 images"),
            ("<image><image>", ["a.png"], "2 marks for 1 images"),
            ("<image>?", [], "1 marks for 0 images"),
            (blocks(IMAGE, IMAGE, TEXT), ["a.png"], "2 marks for 1 images"),
            (blocks(IMAGE | {"image": "a.png"}, TEXT), ["a.png"], "1 images"),
            (blocks(IMAGE | {"image": "a.png"}, IMAGE), [], "1 images in 2 image blocks"),
            (blocks({"type": "video"}, TEXT), ["a.png"], "video"),
        ],
    )
    def test_others_are_refused_with_the_row(self, folder: Path, prompt: Any, images: list[str], value: str) -> None:
        error = refusal(as_one(folder, prompt, images=images))
        assert "line 1" in error.place
        assert error.value == value

    @pytest.mark.parametrize(
        "block",
        [
            {"type": "image", "image": "a.png"},
            {"type": "image", "path": "a.png"},
            {"type": "image", "url": data_uri(A)},
            {"type": "image_url", "image_url": {"url": data_uri(A)}},
        ],
    )
    def test_an_image_in_its_block(self, folder: Path, block: dict[str, Any]) -> None:
        (found,) = read(as_one(folder, blocks(TEXT, block))).prompts
        assert json.loads(found.text) == blocks(TEXT, IMAGE)
        assert named((found,)) == [[digest(A)]]


def animated(kind: str) -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in (0, 200)]
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a complete image"),
        (b"no image", "not a complete image"),
        (A[:40], "complete image"),
        (cut_jpeg(), "decoded"),
        (animated("PNG"), "animated"),
        (animated("WEBP"), "animated"),
        (animated("GIF"), "not a complete image"),
        (header_only_png(0, 3), "1x1 pixel|not a complete image"),
        (header_only_png(30_000, 30_000), "smaller"),
        (png(mode="F", kind="TIFF"), "not a complete image"),
    ],
)
def test_what_is_no_usable_image_is_refused_with_its_row(folder: Path, content: bytes, reason: str) -> None:
    (folder / "bad.png").write_bytes(content)
    rows = [{"prompt": "a", "images": ["a.png"]}, {"prompt": "b", "images": ["a.png", "bad.png"]}]
    (folder / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match=reason) as caught:
        read(folder / "set.jsonl")
    assert caught.value.place == f"data.prompts: {folder}/set.jsonl, line 2, column images, image 2"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("missing.png", r"no such file.*a\.png"),
        ("../secret.png", "leads out"),
        ("https://example.com/a.png", "not fetched from the web"),
        ("a.gif", r"\.webp"),
        ("pictures", r"\.webp"),
        (7, "Name a file"),
        ([None], "Name a file"),
        ("data:image/png;base64,%%%", "base64"),
        ("data:image/png,abc", "data:image/TYPE;base64"),
        ("data:text/plain;base64,YQ==", "data:image/TYPE;base64"),
        (data_uri(b"no image"), "not a complete image"),
    ],
)
def test_a_name_that_is_none_is_refused(folder: Path, value: object, reason: str) -> None:
    (folder.parent / "secret.png").write_bytes(A)
    error = refusal(as_one(folder, "a", image=value))
    assert error.place.startswith(f"data.prompts: {folder}/one.jsonl, line 1, column image")
    with pytest.raises(InputError, match=reason):
        raise error
    assert len(str(error)) < 1000


class TestConversion:
    def test_the_size_is_that_of_the_upright_image(self, folder: Path) -> None:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        (folder / "turned.jpg").write_bytes(png(size=(30, 20), kind="JPEG", exif=exif))
        (prompt,) = read(as_one(folder, "a", image="turned.jpg")).prompts
        assert prompt.sources[0].size == (20, 30)
        assert SourceImage.of(prompt.sources[0].load()).open().size == (20, 30)

    def test_the_bound_is_of_the_configuration(self, folder: Path) -> None:
        assert named(read(as_one(folder, "a", image="a.png"), SourceColumns(max_pixels=24)).prompts) == [[digest(A)]]
        error = refusal(as_one(folder, "a", image="a.png"), SourceColumns(max_pixels=23))
        assert "6x4 pixels" in str(error.value)
        assert "data.max_image_pixels is 23" in error.hint


def test_images_are_those_that_were_read_or_refused_with_their_row(folder: Path) -> None:
    (prompt,) = read(as_one(folder, "a", image="a.png")).prompts
    (folder / "a.png").write_bytes(B)
    with pytest.raises(InputError, match=digest(A)) as caught:
        prompt.sources[0].load()
    assert "line 1, column image" in caught.value.place
    file = read(as_parquet(folder))
    (folder / "set.parquet").unlink()
    assert [source.load() for source in file.prompts[1].sources] == [A, B]


def test_so_many_images_are_decoded_and_of_the_others_the_headers(folder: Path) -> None:
    uris = [data_uri(png(0, (1 + number % 40, 1 + number // 40))) for number in range(DECODED)]
    cut = data_uri(cut_jpeg())
    path = folder / "set.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "a", "image": uri}) for uri in [*uris, cut]))
    assert len(read(path).prompts) == DECODED + 1
    path.write_text("\n".join(json.dumps({"prompt": "a", "image": uri}) for uri in [*uris[1:], cut]))
    assert f"line {DECODED}, column image" in refusal(path).place
