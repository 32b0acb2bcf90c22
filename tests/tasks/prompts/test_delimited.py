"""CSV and TSV: quotes, line numbers and types, and what polars writes reads back in every format."""

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tasks.reading import Write, read, refusal, texts


class TestTables:
    def test_csv_quotes_and_newlines_in_fields(self, write: Write) -> None:
        path = write("set.csv", 'id,prompt\r\n1,"a sign, ""STOP"",\nat night"\r\n\r\n2,"b"\r\n3,c "d" e')
        prompts = read(path)
        assert texts(prompts) == ['a sign, "STOP",\nat night', "b", 'c "d" e']
        assert [prompt.columns for prompt in prompts] == [{"id": 1}, {"id": 2}, {"id": 3}]

    def test_line_numbers_count_newlines_in_fields(self, write: Write) -> None:
        error = refusal(write("set.csv", 'prompt,n\n"a\nb",1\n\n  ,2\n'))
        assert error.place.endswith("set.csv, line 5, column prompt")

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

    def test_tsv_that_quotes_empty_text(self, write: Write) -> None:
        (prompt,) = read(write("set.tsv", 'Prompt\tn\na red circle\t""\n'))
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
    prompts = read(path)
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
    assert texts(read(path)) == [text.strip() for text, _ in rows]
