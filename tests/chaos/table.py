"""Where the kills fell, as a table in markdown."""

from collections import Counter
from collections.abc import Sequence

from tests.chaos.campaign import Fall

HOW = ("at a moment", "at an operation")


def table_of(falls: Sequence[Fall]) -> str:
    """A row a stage and step, the number of kills of each kind."""
    counts = Counter((fall.place, fall.how) for fall in falls)
    kinds = [*HOW, *sorted({fall.how for fall in falls} - set(HOW))]
    rows = [f"| stage | step | {' | '.join(kinds)} |", f"|---|---|{'---|' * len(kinds)}"]
    for place in sorted({fall.place for fall in falls}):
        numbers = " | ".join(str(counts[place, kind] or "") for kind in kinds)
        rows.append(f"| {place.stage} | {place.step} | {numbers} |")
    sums = " | ".join(str(sum(counts[place, kind] for place in {fall.place for fall in falls})) for kind in kinds)
    return "\n".join([*rows, f"| all | | {sums} |"]) + "\n"
