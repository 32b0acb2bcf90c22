"""docs/commands.md is what the program and the Makefile say."""

from tests.flows.commands_page import PAGE, page


def test_the_page_has_every_command_with_every_option() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
