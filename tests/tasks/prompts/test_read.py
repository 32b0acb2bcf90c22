"""Each format of prompt files, which column holds the prompts, what is refused by line, and prompt ids."""

import io
import json
from pathlib import Path

import fsspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

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


class TestColumnChoice:
    def test_order_of_preference(self, write: Write) -> None:
        names = ["instruction", "Prompts", "Prompt", "prompt_raw", "prompt_en", "prompt"]
        for count in range(1, 7):
            table = ",".join(["other", *names[:count]]) + "\n" + ",".join(["other", *names[:count]]) + "\n"
            (prompt,) = read_prompts(write("set.csv", table))
            assert prompt.text == names[count - 1]
            assert set(prompt.columns) == {"other", *names[: count - 1]}

    def test_a_named_column_wins(self, write: Write) -> None:
        (prompt,) = read_prompts(write("set.csv", "prompt,caption\na,b\n"), column="caption")
        assert (prompt.text, prompt.columns) == ("b", {"prompt": "a"})

    def test_no_prompt_column_lists_what_there_is(self, write: Write) -> None:
        path = write("set.csv", "caption,tag\na,b\n")
        assert "caption, tag" in str(refusal(path))
        assert refusal(path, column="captoin").hint.endswith("Nearest: caption.")


@pytest.mark.parametrize("value", ["null", '""', '" \\t"', "7", '["a"]', '{"text": "a"}'])
def test_a_prompt_that_is_no_text_names_its_line(write: Write, value: str) -> None:
    error = refusal(write("set.jsonl", f'{{"prompt": "a"}}\n\n{{"prompt": {value}}}'))
    assert error.place.endswith("set.jsonl, line 3, column prompt")
    assert error.value == json.loads(value)


def test_a_row_without_the_prompt_column_names_its_line(write: Write) -> None:
    assert refusal(write("set.jsonl", '{"prompt": "a"}\n{"text": "b"}')).place.endswith("line 2, column prompt")


class TestFiles:
    def test_a_missing_file_names_its_neighbours(self, write: Write) -> None:
        path = write("PartiPrompts.tsv", "Prompt\na\n")
        assert refusal(path.with_name("partiprompt.tsv")).hint == (
            "There is no such file. The folder contains: PartiPrompts.tsv."
        )
        assert "nor the folder" in refusal(path.parent / "none" / "x.txt").hint

    def test_a_folder(self, write: Write) -> None:
        assert "set.txt" in refusal(write("set.txt", "a").parent).hint

    @pytest.mark.parametrize("ending", ["txt", "jsonl", "json", "csv", "tsv", "parquet"])
    def test_an_empty_file(self, write: Write, ending: str) -> None:
        assert refusal(write(f"set.{ending}", "")).value == "an empty file"

    @pytest.mark.parametrize(
        ("name", "content"),
        [("a.txt", "\n  \n\t\n"), ("a.jsonl", "\n \n"), ("a.json", "[]"), ("a.csv", "prompt,n\n"), ("a.txt", "\ufeff")],
    )
    def test_no_prompts(self, write: Write, name: str, content: str) -> None:
        assert refusal(write(name, content)).value == "no prompts"

    @pytest.mark.parametrize("name", ["set.xlsx", "set.txt.gz", "set"])
    def test_an_unknown_ending(self, write: Write, name: str) -> None:
        assert ".parquet" in refusal(write(name, "prompt\na\n")).hint

    def test_text_that_is_not_utf8_names_its_line(self, write: Write) -> None:
        assert refusal(write("set.txt", "a\nb\ncafé\n".encode("cp1252"))).place.endswith("set.txt, line 3")
        assert refusal(write("set.csv", "prompt\na\n".encode("utf-16"))).value == "UTF-16 text"
        assert refusal(write("set.txt", b"a\nb\0c\n")).place.endswith("set.txt, line 2")

    @pytest.mark.parametrize(("kind", "name"), [("PNG", "PNG"), ("JPEG", "JPEG"), ("GIF", "GIF"), ("WEBP", "WebP")])
    def test_a_renamed_image(self, write: Write, kind: str, name: str) -> None:
        buffer = io.BytesIO()
        Image.new("RGB", (32, 32), "red").save(buffer, kind)
        assert f"a {name} image" in str(refusal(write("set.txt", buffer.getvalue())))

    def test_a_url(self) -> None:
        filesystem = fsspec.filesystem("memory")
        filesystem.pipe("/prompt-sets/set.tsv", b"Prompt\tn\na\t1\n")
        assert texts(read_prompts("memory://prompt-sets/set.tsv")) == ["a"]
        assert "set.tsv" in refusal("memory://prompt-sets/sett.tsv").hint

    def test_a_url_of_an_unknown_kind(self) -> None:
        assert refusal("nowhere://set.txt").value == "nowhere://set.txt"

    def test_the_home_folder(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write("set.txt", "a\n")
        monkeypatch.setenv("HOME", str(path.parent))
        assert texts(read_prompts("~/set.txt")) == ["a"]


class TestPromptId:
    def test_depends_on_the_text_and_its_occurrence_only(self, write: Write) -> None:
        plain = read_prompts(write("one.txt", "a\nb\na\n"))
        table = read_prompts(write("two.csv", "n,instruction\n1,a\n2,b\n3, a \n"))
        assert [p.prompt_id for p in plain] == [p.prompt_id for p in table]
        assert len({p.prompt_id for p in plain}) == 3
        assert plain[0].prompt_id == read_prompts(write("three.txt", "c\na\n"))[1].prompt_id

    def test_does_not_change_between_releases(self, write: Write) -> None:
        ids = [prompt.prompt_id for prompt in read_prompts(write("set.txt", "a red circle\na red circle\n"))]
        # python -c "import hashlib; print(hashlib.sha256(b'[\"a red circle\", 0]').hexdigest()[:16])"
        assert ids == ["85cb445ee3ccb0e0", "e7c8ed2950c3cb21"]
