"""Names beside the ends of lines, none upon another."""

from collections.abc import Sequence

from matplotlib.axes import Axes


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], *, inches: float) -> None:
    """Write each line's name to the right of the axes, as near to the height of its end as the others leave room.

    Args:
        axes: whose vertical limits are final.
        ends: value of the line's end, name and colour.
        inches: height of the axes, about.
    """
    low, high = axes.get_ylim()
    shares = [(value - low) / (high - low) for value, _, _ in ends]
    placed = spread_apart(shares, gap=0.17 / inches)
    for share, at, (_, name, colour) in zip(shares, placed, ends, strict=True):
        axes.annotate(
            name,
            xy=(1.0, share),
            xytext=(1.05, at),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=colour,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "alpha": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 2,
                "shrinkB": 0,
            },
            annotation_clip=False,
        )


def spread_apart(positions: Sequence[float], gap: float) -> list[float]:
    """Positions moved as little as needed that are at least `gap` apart, in the same order.

    Those that collide share the room around their mean: pool adjacent violators on the positions less their gaps.
    """
    order = sorted(range(len(positions)), key=lambda index: (positions[index], index))
    blocks: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        blocks.append((positions[index] - rank * gap, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (last, last_size), (previous, previous_size) = blocks.pop(), blocks.pop()
            size = last_size + previous_size
            blocks.append(((last * last_size + previous * previous_size) / size, size))
    placed = [0.0] * len(positions)
    ranks = iter(enumerate(order))
    for base, size in blocks:
        for _ in range(size):
            rank, index = next(ranks)
            placed[index] = base + rank * gap
    return placed
