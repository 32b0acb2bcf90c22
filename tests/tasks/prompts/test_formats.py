"""Parquet by column, and every kind of file that is refused: one message with a hint for each."""

import datetime
import gzip
import io
import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.tasks.reading import Write, parquet_bytes, read, refusal, texts


class TestParquet:
    def test_values_become_plain_json(self, tmp_path: Path) -> None:
        path = tmp_path / "set.parquet"
        frame = pl.DataFrame(
            {
                "prompt": ["a", "b"],
                "include": [[{"class": "cow", "count": 2}], None],
                "day": [None, pl.Series(["2024-02-29"]).str.to_date()[0]],
                "cost": pl.Series(["1.25", "2.5"]).cast(pl.Decimal(10, 2)),
                "kind": pl.Series(["x", "x"], dtype=pl.Categorical),
            }
        )
        frame.write_parquet(path)
        first, second = read(path)
        shared = {"kind": "x"}
        assert first.columns == {"include": [{"class": "cow", "count": 2}], "day": None, "cost": 1.25, **shared}
        assert second.columns == {"include": None, "day": "2024-02-29", "cost": 2.5, **shared}
        assert json.loads(json.dumps([first.columns, second.columns])) == [first.columns, second.columns]

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), datetime.timedelta(1)])
    def test_what_json_has_no_value_for_is_refused(self, tmp_path: Path, value: object) -> None:
        pl.DataFrame({"prompt": ["a"], "x": [value]}).write_parquet(tmp_path / "set.parquet")
        assert refusal(tmp_path / "set.parquet").place.endswith("set.parquet, row 1, column x")

    def test_a_damaged_file_is_refused(self, write: Write) -> None:
        buffer = io.BytesIO()
        pl.DataFrame({"prompt": ["a"] * 100}).write_parquet(buffer)
        assert "unreadable Parquet" in str(refusal(write("set.parquet", buffer.getvalue()[:-20])))
        assert "unreadable Parquet" in str(refusal(write("text.parquet", "prompt\na\n")))

    @pytest.mark.parametrize(
        "kind",
        [
            pa.binary(),
            pa.large_binary(),
            pa.binary(4),
            pa.list_(pa.binary()),
            pa.struct([("path", pa.string()), ("bytes", pa.binary())]),
            pa.dictionary(pa.int32(), pa.binary()),
        ],
    )
    def test_bytes_are_never_read(self, tmp_path: Path, kind: pa.DataType) -> None:
        path = tmp_path / "set.parquet"
        image = b"\x89PNG"
        nested = {"list": [image], "struct": {"path": "a", "bytes": image}}
        value = nested.get(str(kind).split("<")[0], image)
        images = pa.array([value, None]).cast(kind) if pa.types.is_dictionary(kind) else pa.array([value, None], kind)
        pq.write_table(pa.table({"image": images, "caption": ["a", "b"], "url": ["u", "v"]}), path)
        # Any read of the images fails.
        group, content = pq.ParquetFile(path).metadata.row_group(0), bytearray(path.read_bytes())
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema.startswith("image"):
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                content[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
        path.write_bytes(content)
        with pytest.raises((OSError, pa.ArrowException)):
            pq.read_table(path)
        prompts = read(path)
        assert texts(prompts) == ["a", "b"]
        assert [prompt.columns for prompt in prompts] == [{"url": "u"}, {"url": "v"}]
        assert "bytes" in refusal(path, columns=["image"]).hint
        assert refusal(path, column="image").value == "bytes"


def image_bytes(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(buffer, kind)
    return buffer.getvalue()


PAGE = "<!-- cached -->\n<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
NOT_TEXT = "not UTF-8 text"


@pytest.mark.parametrize(
    ("name", "content", "line", "word"),
    [
        *((f"a.{ending}", b"", None, "an empty file") for ending in ("txt", "jsonl", "json", "csv", "tsv", "parquet")),
        ("a.txt", b"\n  \n\t\n", None, "no prompts"),
        ("a.txt", b"\xef\xbb\xbf", None, "no prompts"),
        ("a.jsonl", b"\n \n", None, "no prompts"),
        ("a.json", b"[]", None, "no prompts"),
        ("a.csv", b"prompt,n\n", None, "no prompts"),
        ("a.parquet", parquet_bytes({"prompt": []}), None, "no prompts"),
        ("a.txt", "red\n\u200b\u200d\ufeff\n".encode(), "line 2", "not seen"),
        ("a.csv", "prompt,n\na,1\n\u2060\u00ad,2\n".encode(), "line 3", "not seen"),
        ("a.jsonl", '{"prompt": "\u3164\ufe0f"}'.encode(), "line 1", "not seen"),
        ("a.txt", "a\nb\ncafé\n".encode("cp1252"), "line 3", NOT_TEXT),
        ("a.txt", b"a\nb\0c\n", "line 2", NOT_TEXT),
        ("a.csv", "prompt\na\n".encode("utf-16-le"), "line 1", NOT_TEXT),
        ("a.txt", b"\xff\xfea\0\n\0b", "line 2", NOT_TEXT),
        ("a.txt", "a\n".encode("utf-32"), "line 1", NOT_TEXT),
        ("a.txt", image_bytes("PNG"), "line 1", NOT_TEXT),
        ("a.txt", image_bytes("JPEG"), "line 1", NOT_TEXT),
        ("a.txt", image_bytes("GIF"), "line 1", NOT_TEXT),
        ("a.txt", image_bytes("WEBP"), "line 1", NOT_TEXT),
        ("a.csv", parquet_bytes({"prompt": ["a"]}), None, NOT_TEXT),
        ("a.csv", b"PK\x03\x04\x14\0\x06\0", "line 1", NOT_TEXT),
        ("a.jsonl", gzip.compress(b'"a"', mtime=0), "line 1", NOT_TEXT),
        ("a.txt", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "line 2", NOT_TEXT),
        *((f"a.{ending}", PAGE.encode(), None, "HTML") for ending in ("txt", "jsonl", "json", "csv", "tsv", "parquet")),
        ("a.txt", PAGE.encode("utf-16"), None, "HTML"),
        ("a.json", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', None, "XML"),
        *((f"a.{ending}", POINTER.encode(), None, "git lfs pull") for ending in ("txt", "csv", "parquet")),
        ("a.jsonl.gz", b'{"prompt": "a"}', None, "Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}', mtime=0)[:-9], None, "cannot be read"),
        ("a.xlsx", b"PK", None, ".parquet"),
        ("a", b"prompt\na\n", None, ".parquet"),
    ],
)
def test_a_refused_file(write: Write, name: str, content: bytes, line: str | None, word: str) -> None:
    error = refusal(write(name, content))
    assert error.place.startswith("data.prompts")
    assert line is None or f", {line}" in error.place
    assert word in str(error)
    assert len(str(error)) < 500
    assert error.hint


@pytest.mark.parametrize("text", ["RIFF in neon letters", "a page with <html> on it", "<3 in neon", "%PDF on a badge"])
def test_a_prompt_that_begins_as_another_file(write: Write, text: str) -> None:
    assert texts(read(write("set.txt", text))) == [text]
