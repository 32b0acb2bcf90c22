"""Metrics over iterations as a small SVG: drawn in microseconds, for a report that every iteration leaves."""

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _MARGIN = 560, 170, 44
_LEGEND_LINE, _LEGEND_LETTERS = 16, 16
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed")


def curve_svg(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """One line a series, with the range of both axes and the last value of each.

    Args:
        series: (iteration, value) points by name; at least one point in all.
    """
    points = [point for line in series.values() for point in line]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    height = max(_HEIGHT, 44 + _LEGEND_LINE * len(series))
    across, up = (right - left) or 1.0, (high - low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        drawn_x = _MARGIN + (x - left) / across * (_WIDTH - _MARGIN - 150)
        return drawn_x, height - 28 - (y - low) / up * (height - 48)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(4, place(left, high)[1] + 4, f"{high:.3f}", "#555555"),
        _text(4, place(left, low)[1] + 4, f"{low:.3f}", "#555555"),
        _text(_MARGIN, height - 8, f"iteration {left:g} to {right:g}", "#555555"),
    ]
    for index, (name, line) in enumerate(series.items()):
        if not line:
            continue
        colour = _COLOURS[index % len(_COLOURS)]
        drawn = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in drawn]
        shown = name if len(name) <= _LEGEND_LETTERS else f"{name[: _LEGEND_LETTERS - 1]}…"
        parts.append(_text(_WIDTH - 138, 20 + _LEGEND_LINE * index, f"{shown} {line[-1][1]:.3f}", colour))
    return "".join([*parts, "</svg>"])


def _text(x: float, y: float, text: str, colour: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.1f}" fill="{colour}">{escape(text)}</text>'
