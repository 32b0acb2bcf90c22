"""Plain text for the terminal."""

from rich.text import Text


def plain(text: str) -> Text:
    """Text that is data: no markup, and nothing in it that a terminal would obey."""
    return Text("".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text))
