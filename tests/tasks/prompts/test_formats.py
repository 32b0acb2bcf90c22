"""CSV and TSV: quotes, line numbers and types, and what polars writes reads back in every format."""

import datetime
import gzip
import io
import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tasks.stage_calls import Write, parquet_bytes, png, read, refusal, texts


class TestTables:
    def test_csv_quotes_and_newlines_in_fields(self, write: Write) -> None:
        path = write("set.csv", 'id,prompt\r\n1,"a sign, ""STOP"",\nat night"\r\n\r\n2,"b"\r\n3,c "d" e')
        prompts = read(path)
        assert texts(prompts) == ['a sign, "STOP",\nat night', "b", 'c "d" e']
        assert [prompt.columns for prompt in prompts] == [{"id": 1}, {"id": 2}, {"id": 3}]
        assert refusal(write("set.csv", "prompt,n,n\na,1,2\n")).value == "n"

    def test_plain_types_only_where_nothing_is_lost(self, write: Write) -> None:
        content = (
            "prompt,i,f,b,code,price,mixed,big\n7,-1,0.5,true,007,1.50,1,9999999999999999999\n8,,2,False,8,2,x,1\n"
        )
        first, second = read(write("set.csv", content))
        assert first.text == "7"
        assert repr(first.columns) == repr(
            {"i": -1, "f": 0.5, "b": True, "code": "007", "price": "1.50", "mixed": "1", "big": "9" * 19}
        )
        assert repr(second.columns) == repr(
            {"i": None, "f": 2.0, "b": False, "code": "8", "price": "2", "mixed": "x", "big": "1"}
        )

    def test_tsv_that_writes_quotation_marks_as_they_are(self, write: Write) -> None:
        path = write(
            "set.tsv",
            'Prompt\tCategory\tNote\n"G I G G L E" painted on a wall\tArt\t\n'
            'an 8" pipe\tArt\tsee "this"\n"BUZZ"\tArt\t"a"\n',
        )
        prompts = read(path)
        assert texts(prompts) == ['"G I G G L E" painted on a wall', 'an 8" pipe', '"BUZZ"']
        assert [prompt.columns["Note"] for prompt in prompts] == [None, 'see "this"', '"a"']

    @pytest.mark.parametrize(
        "content", ['Prompt\tn\na red circle\t""\n', 'Prompt\tn\n"a\tb"\t1\n', '"Prompt"\n"a"\n', 'Prompt\n"a\nb"\n']
    )
    def test_tsv_with_fields_in_quotes_is_refused_and_read_as_csv(self, write: Write, content: str) -> None:
        error = refusal(write("set.tsv", content))
        assert error.value == "fields in quotes"
        assert ".csv" in error.hint
        (prompt,) = read(write("set.csv", content))
        assert '"' not in prompt.text

    @pytest.mark.parametrize(
        ("content", "line", "value"),
        [
            ("prompt,n\na,1\nb\n", 3, "1 fields"),
            ("prompt,n\na,1\na cat, black,2\n", 3, "3 fields"),
            ('prompt,n\na,1\n"never closed,2\nc,3\n', 3, "an unreadable record"),
            ('prompt,n\na,1\n"closed" and on,2\nc,3\n', 3, "an unreadable record"),
            ('prompt,n\n"a\nb",1\n\n  ,2\n', 5, "  "),
        ],
    )
    def test_an_unreadable_record_names_its_line(self, write: Write, content: str, line: int, value: str) -> None:
        """Newlines in fields count, and so do blank lines."""
        error = refusal(write("set.csv", content))
        assert f"set.csv, line {line}" in error.place
        assert error.value == value


cells = st.text(st.sampled_from("ab\"',\t\n\\#ü🙂\u2028 "), max_size=8)
rows = st.lists(st.tuples(cells.filter(str.strip), cells), min_size=1, max_size=6)


@pytest.mark.parametrize("form", ["csv", "tab.csv", "tsv", "jsonl", "parquet"])
@given(rows=rows)
def test_reads_back_what_polars_writes(
    tmp_path_factory: pytest.TempPathFactory, form: str, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / f"polars.{form}"
    frame = pl.DataFrame({"prompt": [row[0] for row in rows], "note": [row[1] for row in rows]})
    match form:
        case "csv":
            frame.write_csv(path)
        case "tab.csv" | "tsv":
            frame.write_csv(path, separator="\t", quote_style="always" if form == "tab.csv" else "necessary")
        case "jsonl":
            frame.write_ndjson(path)
        case "parquet":
            frame.write_parquet(path)
    if form == "tsv" and '"' in path.read_text():
        # Never another meaning in silence.
        assert refusal(path).value in ("fields in quotes", "1 fields", "3 fields")
        return
    prompts = read(path)
    assert texts(prompts) == [text for text, _ in rows]
    empty = "" if form in ("jsonl", "parquet") else None
    assert [prompt.columns["note"] for prompt in prompts] == [note or empty for _, note in rows]


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
        for name, content in (("set.parquet", buffer.getvalue()[:-20]), ("text.parquet", b"prompt\na\n")):
            error = refusal(path := write(name, content))
            assert error.place == f"data.prompts: {path}"
            assert str(error.value).startswith("unreadable Parquet")

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
        error = refusal(path, columns=["image"])
        assert (error.place, error.value) == ("data.columns", "image")
        assert refusal(path, column="image").value == "bytes"


PAGE = b"<!-- cached -->\n<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ERROR = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'
WITHOUT_PROMPTS = (
    *(("txt", b"\n  \n\t\n"), ("txt", b"\xef\xbb\xbf"), ("jsonl", b"\n \n"), ("json", b"[]")),
    *(("csv", b"prompt,n\n"), ("parquet", parquet_bytes({"prompt": []}))),
)


@pytest.mark.parametrize(
    ("name", "content", "line", "value"),
    [
        *((f"a.{ending}", b"", "", "an empty file") for ending in ("txt", "jsonl", "json", "csv", "tsv", "parquet")),
        *((f"a.{ending}", content, "", "no prompts") for ending, content in WITHOUT_PROMPTS),
        ("a.txt", "red\n\u200b\u200d\ufeff\n".encode(), ", line 2, column prompt", "\u200b\u200d\ufeff"),
        ("a.csv", "prompt,n\na,1\n\u2060\u00ad,2\n".encode(), ", line 3, column prompt", "\u2060\u00ad"),
        ("a.jsonl", '{"prompt": "\u3164\ufe0f"}'.encode(), ", line 1, column prompt", "\u3164\ufe0f"),
        ("a.txt", "a\nb\ncafé\n".encode("cp1252"), ", line 3", b"\xe9\n"),
        ("a.txt", b"a\nb\0c\n", ", line 2", "\0c\n"),
        ("a.csv", "prompt\na\n".encode("utf-16-le"), ", line 1", "\0r\0o"),
        ("a.txt", b"\xff\xfea\0\n\0b", ", line 2", b"b"),
        ("a.txt", "a\n".encode("utf-32"), ", line 1", "\0a\0\n"),
        ("a.txt", png(), ", line 1", b"\x89PNG"),
        ("a.txt", png(kind="JPEG"), ", line 1", b"\xff\xd8\xff\xe0"),
        ("a.csv", b"PK\x03\x04\x14\0\x06\0", ", line 1", "\0\x06\0"),
        ("a.jsonl", gzip.compress(b'"a"', mtime=0), ", line 1", b"\x8b\x08\0\0"),
        ("a.txt", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", ", line 2", b"\xe2\xe3\xcf\xd3"),
        *((f"a.{each}", PAGE, "", "<!-- cached -->") for each in ("txt", "jsonl", "json", "csv", "tsv", "parquet")),
        ("a.txt", PAGE.decode().encode("utf-16"), "", "<!-- cached -->"),
        ("a.json", ERROR, "", ERROR.decode()),
        *((f"a.{ending}", POINTER, "", "a Git LFS pointer") for ending in ("txt", "csv", "parquet")),
        *((f"a{ending}", b"prompt\na\n", "", f"a{ending}") for ending in (".xlsx", "")),
    ],
)
def test_a_refused_file(write: Write, name: str, content: bytes, line: str, value: object) -> None:
    path = write(name, content)
    error = refusal(path)
    assert (error.place.removesuffix(f": {path}{line}"), error.value) == ("data.prompts", value)
    assert len(str(error)) < 500


@pytest.mark.parametrize("content", [b'{"prompt": "a"}', gzip.compress(b'{"prompt": "a"}', mtime=0)[:-9]])
def test_a_damaged_archive(write: Write, content: bytes) -> None:
    path = write("a.jsonl.gz", content)
    assert (refusal(path).place, refusal(path).value) == ("data.prompts", str(path))


@pytest.mark.parametrize("text", ["RIFF in neon letters", "a page with <html> on it", "<3 in neon", "%PDF on a badge"])
def test_a_prompt_that_begins_as_another_file(write: Write, text: str) -> None:
    assert texts(read(write("set.txt", text))) == [text]
