"""Each file format of prompt sets: what comes out, what polars wrote, and the line that an error names."""

import io
import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prompts.read import read_prompts
from tests.tasks.reading import Write, refusal, texts


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        # A byte order mark, CRLF, blank lines and no final newline.
        (
            "a.txt",
            b'\xef\xbb\xbfa red circle\r\n\r\n   \r\n  a "blue" square \r\nlast',
            ["a red circle", 'a "blue" square', "last"],
        ),
        # Only line ends separate prompts.
        (
            "a.TXT",
            "one\u2028still one\x0cand\x85on\ntwo\rthree",
            ["one\u2028still one\x0cand\x85on", "two", "three"],
        ),
        # The magic number of an image.
        ("a.txt", "RIFF in neon letters\n", ["RIFF in neon letters"]),
        ("a.csv", b'prompt\r\n"a\r\nb\rc"\r\n', ["a\r\nb\rc"]),
        # Quotation marks are text unless every field is quoted.
        ("a.tsv", 'Prompt\tn\n"BUZZ"\t1\nplain\t2\n', ['"BUZZ"', "plain"]),
        ("a.tsv", '"Prompt"\t"n"\n"BUZZ"\t"1"\n', ["BUZZ"]),
    ],
)
def test_prompts_of_a_file(write: Write, name: str, content: str | bytes, prompts: list[str]) -> None:
    assert texts(read_prompts(write(name, content))) == prompts


class TestText:
    def test_limit_takes_the_first(self, write: Write) -> None:
        path = write("set.txt", "a\nb\nc\n")
        assert read_prompts(path, limit=2) == read_prompts(path)[:2]
        assert len(read_prompts(path, limit=9)) == 3
        assert refusal(path, limit=0).place == "data.limit"


class TestJson:
    def test_columns_keep_their_json_values(self, write: Write) -> None:
        row = {"tag": "two", "include": [{"class": "cow", "count": 2}], "prompt": "two cows", "w": 0.5, "x": None}
        prompts = read_prompts(write("set.jsonl", json.dumps(row) + '\n\n{"prompt": "\\u00fc"}'))
        assert texts(prompts) == ["two cows", "ü"]
        assert prompts[0].columns == {key: value for key, value in row.items() if key != "prompt"}
        assert prompts[1].columns == {}

    def test_json_may_be_lines_or_an_array(self, write: Write) -> None:
        rows = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": [2]}]
        lines = read_prompts(write("lines.json", "\n".join(map(json.dumps, rows))))
        array = read_prompts(write("array.json", "\n" + json.dumps(rows, indent=2)))
        assert lines == array
        assert [prompt.columns for prompt in array] == [{"n": 1}, {"n": [2]}]

    @pytest.mark.parametrize(
        ("content", "line"),
        [
            ('{"prompt": "a"}\n\n{"prompt": }', 3),
            ('{"prompt": "a"}\n["b"]', 2),
            ('{"prompt": "a"}\n"b"', 2),
            ('{"prompt": "a", "x": NaN}', 1),
            ('{"prompt": "a", "x": 1e999}', 1),
            ('{"prompt": "a \\ud83d"}', 1),
            ('{"prompt": "a"} {"prompt": "b"}', 1),
            ('[{"prompt": "a"},\n {"prompt": "b"},,\n]', 2),
            ('{"prompt": "a"}\n' + '{"x":' * 100_000, 2),
        ],
    )
    def test_invalid_json_names_the_line(self, write: Write, content: str, line: int) -> None:
        error = refusal(path := write("set.jsonl", content))
        assert error.place == f"data.prompts: {path}, line {line}"
        assert len(str(error)) < 500

    def test_an_array_names_the_item(self, write: Write) -> None:
        assert refusal(write("set.json", '[{"prompt": "a"}, "b"]')).place.endswith("set.json, item 2")


class TestTables:
    def test_csv_quotes_and_newlines_in_fields(self, write: Write) -> None:
        path = write("set.csv", 'id,prompt\r\n1,"a sign, ""STOP"",\nat night"\r\n\r\n2,"b"\r\n3,c "d" e')
        prompts = read_prompts(path)
        assert texts(prompts) == ['a sign, "STOP",\nat night', "b", 'c "d" e']
        assert [prompt.columns for prompt in prompts] == [{"id": 1}, {"id": 2}, {"id": 3}]

    def test_line_numbers_count_newlines_in_fields(self, write: Write) -> None:
        error = refusal(write("set.csv", 'prompt,n\n"a\nb",1\n\n  ,2\n'))
        assert error.place.endswith("set.csv, line 5, column prompt")

    def test_plain_types_only_where_nothing_is_lost(self, write: Write) -> None:
        content = (
            "prompt,i,f,b,code,price,mixed,big\n7,-1,0.5,true,007,1.50,1,9999999999999999999\n8,,2,False,8,2,x,1\n"
        )
        first, second = read_prompts(write("set.csv", content))
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
        prompts = read_prompts(path)
        assert texts(prompts) == ['"G I G G L E" painted on a wall', 'an 8" pipe', '"BUZZ"']
        assert [prompt.columns["Note"] for prompt in prompts] == [None, 'see "this"', '"a"']

    def test_tsv_that_quotes_empty_text(self, write: Write) -> None:
        (prompt,) = read_prompts(write("set.tsv", 'Prompt\tn\na red circle\t""\n'))
        assert prompt.columns == {"n": None}

    @pytest.mark.parametrize("content", ["prompt,n\na,1\nb\n", "prompt,n\na,1\na cat, black,2\n"])
    def test_ragged_rows_are_refused(self, write: Write, content: str) -> None:
        error = refusal(write("set.csv", content))
        assert error.place.endswith("set.csv, line 3")
        assert "quotes around" in error.hint

    @pytest.mark.parametrize("cell", ['"never closed', '"closed" and on'])
    def test_broken_quotes_are_refused(self, write: Write, cell: str) -> None:
        assert refusal(write("set.csv", f"prompt,n\na,1\n{cell},2\nc,3\n")).place.endswith("set.csv, line 3")

    def test_a_column_that_stands_there_twice_is_refused(self, write: Write) -> None:
        assert refusal(write("set.csv", "prompt,n,n\na,1,2\n")).value == "n"


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
        first, second = read_prompts(path)
        shared = {"kind": "x"}
        assert first.columns == {"include": [{"class": "cow", "count": 2}], "day": None, "cost": 1.25, **shared}
        assert second.columns == {"include": None, "day": "2024-02-29", "cost": 2.5, **shared}
        assert json.loads(json.dumps([first.columns, second.columns])) == [first.columns, second.columns]

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), b"\x00"])
    def test_what_json_has_no_value_for_is_refused(self, tmp_path: Path, value: object) -> None:
        pl.DataFrame({"prompt": ["a"], "x": [value]}).write_parquet(tmp_path / "set.parquet")
        assert refusal(tmp_path / "set.parquet").place.endswith("set.parquet, row 1, column x")

    def test_a_damaged_file_is_refused(self, write: Write) -> None:
        buffer = io.BytesIO()
        pl.DataFrame({"prompt": ["a"] * 100}).write_parquet(buffer)
        assert "unreadable Parquet" in str(refusal(write("set.parquet", buffer.getvalue()[:-20])))
        assert "unreadable Parquet" in str(refusal(write("text.parquet", "prompt\na\n")))


cells = st.text(st.sampled_from("ab\"',\t\n\\#ü🙂\u2028 "), max_size=8)
rows = st.lists(st.tuples(cells.filter(str.strip), cells), min_size=1, max_size=6)


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
@given(rows=rows)
def test_reads_back_what_polars_writes(
    tmp_path_factory: pytest.TempPathFactory, ending: str, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / f"polars.{ending}"
    frame = pl.DataFrame({"prompt": [row[0] for row in rows], "note": [row[1] for row in rows]})
    match ending:
        case "csv":
            frame.write_csv(path)
        case "tsv":
            frame.write_csv(path, separator="\t", quote_style="always")
        case "jsonl":
            frame.write_ndjson(path)
        case "parquet":
            frame.write_parquet(path)
    prompts = read_prompts(path)
    empty = None if ending in ("csv", "tsv") else ""
    assert texts(prompts) == [text.strip() for text, _ in rows]
    assert [prompt.columns["note"] for prompt in prompts] == [note or empty for _, note in rows]


@given(rows=rows)
def test_reads_back_a_tsv_with_quotes_where_they_are_needed(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "needed.tsv"
    frame = pl.DataFrame({"prompt": [row[0] for row in rows], "note": [row[1] for row in rows]})
    frame.write_csv(path, separator="\t", quote_style="necessary")
    assert texts(read_prompts(path)) == [text.strip() for text, _ in rows]
