"""Plain text and sparklines for the terminal."""

import itertools
import math
from collections.abc import Sequence

from rich.text import Text


def plain(text: str) -> Text:
    """Text that is data: no markup, and nothing in it that a terminal would obey."""
    return Text("".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text))


SPARK_WIDTH = 32
UNICODE_BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-:=+*#"


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH, blocks: str = UNICODE_BLOCKS) -> str:
    """Values as a line of blocks from lowest to highest; more values than fit are averaged in equal runs."""
    if not values:
        return ""
    if len(values) > width:
        edges = [index * len(values) // width for index in range(width + 1)]
        values = [math.fsum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    if high <= low:
        return blocks[len(blocks) // 2] * len(values)
    return "".join(blocks[min(len(blocks) - 1, int((value - low) / (high - low) * len(blocks)))] for value in values)
