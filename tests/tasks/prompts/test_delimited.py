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
    def test_a_record_that_cannot_be_read_names_its_line(
        self, write: Write, content: str, line: int, value: str
    ) -> None:
        """Newlines in fields count, and so do blank lines."""
        error = refusal(write("set.csv", content))
        assert f"set.csv, line {line}" in error.place
        assert error.value == value

    def test_a_column_that_stands_there_twice_is_refused(self, write: Write) -> None:
        assert refusal(write("set.csv", "prompt,n,n\na,1,2\n")).value == "n"


cells = st.text(st.sampled_from("ab\"',\t\n\\#ü🙂\u2028 "), max_size=8)
rows = st.lists(st.tuples(cells.filter(str.strip), cells), min_size=1, max_size=6)


@pytest.mark.parametrize("form", ["csv", "always.tsv", "necessary.tsv", "jsonl", "parquet"])
@given(rows=rows)
def test_reads_back_what_polars_writes(
    tmp_path_factory: pytest.TempPathFactory, form: str, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.getbasetemp() / f"polars.{form}"
    frame = pl.DataFrame({"prompt": [row[0] for row in rows], "note": [row[1] for row in rows]})
    match form:
        case "csv":
            frame.write_csv(path)
        case "always.tsv" | "necessary.tsv":
            frame.write_csv(path, separator="\t", quote_style="always" if form == "always.tsv" else "necessary")
        case "jsonl":
            frame.write_ndjson(path)
        case "parquet":
            frame.write_parquet(path)
    prompts = read(path)
    assert texts(prompts) == [text.strip() for text, _ in rows]
    if form != "necessary.tsv":
        # It may be taken for a table that writes quotation marks as they are.
        empty = "" if form in ("jsonl", "parquet") else None
        assert [prompt.columns["note"] for prompt in prompts] == [note or empty for _, note in rows]
