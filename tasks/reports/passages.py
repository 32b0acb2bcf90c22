"""Texts that a policy wrote, or was asked: shortened, and made harmless where they are shown."""

import re
import string

MAX_LINES = 12
_MARKUP = frozenset(string.punctuation)
_BREAKS = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def ends(text: str, letters: int, lines: int = MAX_LINES) -> str:
    """The text where it fits into so many letters and lines; else its beginning and, half as long, its end."""
    split = text.split("\n")
    if len(text) <= letters and len(split) <= lines:
        return text
    first, last = "\n".join(split[: lines * 2 // 3]), "\n".join(split[-(lines // 3) :])
    return f"{first[: letters * 2 // 3]} … {last[-(letters // 3) :]}"


def shortened(text: str, letters: int) -> str:
    """The text in one line with its line ends marked, both ends of it where it is long."""
    line = _BREAKS.sub(" ⏎ ", text.strip())
    if len(line) <= letters:
        return line
    tail = letters // 3
    return f"{line[: letters - tail].rstrip()} ... {line[-tail:].lstrip()}"


def in_cell(text: str) -> str:
    """A line that cannot break out of a Markdown table's cell: no markup, no link, no column, nothing invisible."""
    shown = (letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return "".join(f"&#{ord(letter)};" if letter in _MARKUP else letter for letter in shown)


def fenced(text: str) -> str:
    """A Markdown code block that shows the text as it is; its fence is longer than any that the text holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    kept = "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for letter in _BREAKS.sub("\n", text)
    )
    return f"{fence}text\n{kept}\n{fence}"
