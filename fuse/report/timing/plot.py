"""A plain SVG of a few lines on two logarithmic axes.

    100 |        ___ eager
     10 |   ____/
      1 | _/   ------ fused
        +------------
         16   64  256

It needs no plotting library. Each line has its name at its end, instead of a legend.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 110, 44, 44
LABEL_HEIGHT = 14
INK, GRID = "#57606a", "#e4e7eb"
COLOURS = ("#57606a", "#2f6db0", "#7b4fa3", "#3f8f2f")
FUSED = "#c2761b"


def plot(title: str, positions: Sequence[float], series: Mapping[str, Sequence[float]]) -> str:
    """SVG text of one line for each of ``series``; ``positions`` and all figures are positive.

    >>> plot("milliseconds", [1, 10], {"eager": [5, 50], "fused": [0.1, 0.2]}).count("<polyline")
    2
    """
    figures = [figure for line in series.values() for figure in line]
    ticks = _ticks(min(figures), max(figures))
    low, high = min(ticks[0], min(figures)), max(ticks[-1], max(figures))

    def x(position: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * _share(position, positions[0], positions[-1])

    def y(figure: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _share(figure, low, high)

    lines = [f'<text x="{LEFT}" y="24" font-size="14" font-weight="bold">{html.escape(title)}</text>']
    for tick in ticks:
        lines.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        lines.append(_text(LEFT - 8, y(tick) + 4, f"{tick:,g}", "end"))
    shown = positions[:: max(1, math.ceil(len(positions) / 10))]
    lines += [_text(x(position), HEIGHT - BOTTOM + 20, f"{position:,}", "middle") for position in shown]
    ends = {name: y(line[-1]) for name, line in series.items()}
    for number, (name, line) in enumerate(series.items()):
        colour = FUSED if name == "fused" else COLOURS[number % len(COLOURS)]
        points = [(x(position), y(figure)) for position, figure in zip(positions, line, strict=True)]
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3" fill="{colour}"/>' for left, top in points]
    for name, top in _apart(ends):
        lines.append(_text(WIDTH - RIGHT + 10, top + 4, html.escape(name), "start"))
    style = f'font-family="Helvetica,Arial,sans-serif" font-size="12" fill="{INK}"'
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', ground, *lines, "</svg>"])


def _share(value: float, low: float, high: float) -> float:
    """Position of ``value`` between ``low`` (0) and ``high`` (1), on a logarithmic scale."""
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten around all figures, and multiples of 2 and 5 if there are few lines."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1,) if last - first > 2 else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    below = [tick for tick in ticks if tick <= low]
    above = [tick for tick in ticks if tick >= high]
    return [tick for tick in ticks if below[-1] <= tick <= above[0]]


def _apart(places: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Labels with their heights, moved down where they would overlap."""
    last = -math.inf
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        last = max(place, last + LABEL_HEIGHT)
        yield name, last


def _text(left: float, top: float, text: str, anchor: str) -> str:
    return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{text}</text>'
