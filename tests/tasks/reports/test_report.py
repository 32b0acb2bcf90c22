from markdown_it import MarkdownIt
from markupsafe import Markup

from tasks.reports.report import Notice, Report, Table, markdown_of, render
from tests.tasks.reports.test_run_page import EVIL, check_offline
from tests.tasks.reports.test_text import MARKUP

ROWS = [{"name": text, "number": "1"} for text in MARKUP]


def report_of(text: str) -> Report:
    table = Table(text, [{text: text, "words": text}], ("words",), text, text)
    return Report(
        text, [(text, text)], [table, Table("empty", [])], [Notice(text, [text]), Notice("silent", [])], [text]
    )


def test_markdown_has_all_of_it_as_text() -> None:
    for text in MARKUP:
        tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown_of(report_of(text)))
        inline = [token for token in tokens if token.type == "inline" and token.content]
        # Two of the notice, two of the fact; of the table its title, heading, two cells and note; title and last note.
        said = ["".join(child.content for child in token.children or []) for token in inline]
        assert said.count(text) == 2 + 2 + 5 + 2, said
        assert set(said) == {text, "words"}
        kinds = {child.type for token in inline for child in token.children or []}
        assert kinds <= {"text", "text_special", "strong_open", "strong_close"}


def test_a_page_has_all_of_it_as_text_but_for_cells_that_are_markup() -> None:
    page = check_offline(_page(report_of(EVIL)))
    # Also the table's meaning, and the title of the window.
    assert "".join(page.text).count(EVIL) == 2 + 2 + 6 + 2 + 1
    assert "ranranran" not in "".join(page.text)
    assert check_offline(_page(Report("r", tables=[Table("", [{"a": Markup("<i>x</i>")}])]))).named("i")


def _page(report: Report) -> str:
    return render("rewards.html.jinja", title=report.title, subtitle="", summary=report, distributions={}, plots=[])


def test_the_first_rows_say_of_how_many() -> None:
    table = Table("", ROWS)
    assert table.head(len(ROWS), "texts") is table
    assert table.head(2, "texts").rows == ROWS[:2]
    assert table.head(2, "texts").note.startswith(f"2 of {len(ROWS)} texts")
