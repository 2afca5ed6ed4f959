"""A plain SVG of two sketches, for machines without Graphviz: rows from inputs to outputs, boxes inside boxes.

    [x]                  row 0
     |
    [addmm] [addmm]      row 1
        \\    /
        [add]            row 2

Each level is laid out alone: a part stands one row below the lowest part whose data it uses, and a box is as large as
its contents. Unlike Graphviz, this layout does not bend arrows around marks or order rows by crossings; it needs
nothing installed.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fuse.report.pictures.palette import colour
from fuse.report.pictures.reading import Mark
from fuse.report.pictures.sketch import Arrow, Box, Sketch, marks_of

LETTER_WIDTH = 7.0
MARK_HEIGHT = 42.0
VIEW_HEIGHT = 18.0
GAP = 18.0
PADDING = 14.0
HEADER = 20.0


@dataclass(frozen=True)
class _PlacedPart:
    """A part with its size and, for a box, its placed contents; positions are relative to the box around it."""

    part: int | Box
    x: float
    y: float
    width: float
    height: float
    inside: tuple[_PlacedPart, ...] = ()


@dataclass(frozen=True)
class _Anchor:
    """Where arrows meet a mark."""

    middle: float
    top: float
    bottom: float
    right: float


def svg(before: Sketch, after: Sketch, titles: tuple[str, str]) -> str:
    """SVG text of both sketches side by side, each under its title.

    >>> empty = Sketch({}, (), ())
    >>> svg(empty, empty, ("before", "after")).startswith("<svg")
    True
    """
    lines: list[str] = []
    left, height = GAP, 0.0
    for sketch, title in ((before, titles[0]), (after, titles[1])):
        placed, width, tall = _layout(sketch.parts, sketch)
        width = max(width, LETTER_WIDTH * len(title) + 2 * PADDING)
        lines.append(f'<text x="{left:.0f}" y="26" font-size="16" font-weight="bold">{html.escape(title)}</text>')
        anchors: dict[int, _Anchor] = {}
        shapes = list(_shapes(placed, sketch, left, 2 * HEADER, anchors))
        boxes = [shape for shape in shapes if shape.startswith("<rect class")]
        lines += [*boxes, *_curves(sketch.arrows, anchors), *(shape for shape in shapes if shape not in boxes)]
        left, height = left + width + 2 * GAP, max(height, tall)
    size = f'width="{left:.0f}" height="{height + 3 * HEADER:.0f}"'
    style = 'font-family="Helvetica,Arial,sans-serif" font-size="12" text-anchor="start"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *lines, "</svg>"])


def _layout(parts: tuple[int | Box, ...], sketch: Sketch) -> tuple[tuple[_PlacedPart, ...], float, float]:
    """The parts of one level in rows, with the width and height of them all."""
    rows: dict[int, list[_PlacedPart]] = {}
    for part, row in zip(parts, _rows(parts, sketch.arrows), strict=True):
        rows.setdefault(row, []).append(_sized(part, sketch))
    placed: list[_PlacedPart] = []
    widths = {row: sum(item.width + GAP for item in items) - GAP for row, items in rows.items()}
    whole = max(widths.values(), default=0.0)
    y = 0.0
    for row, items in sorted(rows.items()):
        x = (whole - widths[row]) / 2
        for item in items:
            placed.append(_PlacedPart(item.part, x, y, item.width, item.height, item.inside))
            x += item.width + GAP
        y += max(item.height for item in items) + GAP
    return tuple(placed), whole, max(y - GAP, 0.0)


def _sized(part: int | Box, sketch: Sketch) -> _PlacedPart:
    """A part with its size, not yet in its place."""
    if isinstance(part, int):
        mark = sketch.marks[part]
        longest = max(len(line) for line in _lines(mark))
        return _PlacedPart(
            part, 0, 0, LETTER_WIDTH * longest + PADDING, VIEW_HEIGHT if mark.kind == "view" else MARK_HEIGHT
        )
    inside, width, height = _layout(part.parts, sketch)
    width = max(width, LETTER_WIDTH * len(part.label))
    return _PlacedPart(part, 0, 0, width + 2 * PADDING, height + HEADER + 2 * PADDING, inside)


def _rows(parts: tuple[int | Box, ...], arrows: tuple[Arrow, ...]) -> list[int]:
    """For each part of one level the row it stands in."""
    owner = {mark: position for position, part in enumerate(parts) for mark in marks_of(part)}
    feeding: dict[int, list[int]] = {}
    for arrow in arrows:
        if arrow.start in owner and arrow.stop in owner and owner[arrow.start] < owner[arrow.stop]:
            feeding.setdefault(owner[arrow.stop], []).append(owner[arrow.start])
    rows: list[int] = []
    for position in range(len(parts)):
        rows.append(1 + max((rows[source] for source in feeding.get(position, ())), default=-1))
    return rows


def _lines(mark: Mark) -> list[str]:
    name = mark.label if mark.count == 1 else f"{mark.label}  x {mark.count}"
    return [name] if mark.kind == "view" else [line for line in (name, mark.detail, mark.source) if line]


def _shapes(
    placed: Iterable[_PlacedPart], sketch: Sketch, left: float, top: float, anchors: dict[int, _Anchor]
) -> Iterator[str]:
    """Rectangles and text; adds the position of every mark to ``anchors``, for the arrows."""
    for item in placed:
        x, y = left + item.x, top + item.y
        middle = x + item.width / 2
        frame = f'x="{x:.1f}" y="{y:.1f}" width="{item.width:.1f}" height="{item.height:.1f}" rx="6"'
        if isinstance(item.part, Box):
            look = colour(item.part.kind)
            dashes = ' stroke-dasharray="5 3"' if item.part.kind == "repeat" else ' stroke-width="2"'
            yield f'<rect class="box" {frame} fill="{look.fill}" stroke="{look.border}"{dashes}/>'
            label = html.escape(item.part.label)
            yield f'<text x="{x + 8:.1f}" y="{y + 16:.1f}" font-weight="bold" fill="{look.border}">{label}</text>'
            yield from _shapes(item.inside, sketch, x + PADDING, y + HEADER + PADDING / 2, anchors)
            continue
        mark = sketch.marks[item.part]
        look = colour(mark.kind)
        anchors[item.part] = _Anchor(middle, y, y + item.height, x + item.width)
        if mark.kind != "view":
            yield f'<rect {frame} fill="{look.fill}" stroke="{look.border}"/>'
        for number, line in enumerate(_lines(mark)):
            small = f' font-size="9" fill="{colour("view").text}"' if number or mark.kind == "view" else ""
            place = f'x="{middle:.1f}" y="{y + 13 + 12 * number:.1f}" text-anchor="middle"'
            yield f"<text {place}{small}>{html.escape(line)}</text>"


def _curves(arrows: Iterable[Arrow], anchors: Mapping[int, _Anchor]) -> Iterator[str]:
    """A curve with a dot at its end for each arrow; those to the next step are dashed and pass on the right."""
    for arrow in arrows:
        start, stop = anchors[arrow.start], anchors[arrow.stop]
        if arrow.carried:
            y1, y2 = (start.top + start.bottom) / 2, (stop.top + stop.bottom) / 2
            x1, x2 = start.right, stop.right
            bulge = max(x1, x2) + 3 * GAP
            middle = f"{bulge:.1f},{y1:.1f} {bulge:.1f},{y2:.1f}"
            dashes = ' stroke-dasharray="4 3"'
        else:
            x1, y1, x2, y2 = start.middle, start.bottom, stop.middle, stop.top
            bend = max(abs(y2 - y1) / 2, GAP / 2)
            middle = f"{x1:.1f},{y1 + bend:.1f} {x2:.1f},{y2 - bend:.1f}"
            dashes = ""
        path = f"M{x1:.1f},{y1:.1f} C{middle} {x2:.1f},{y2:.1f}"
        yield f'<path d="{path}" fill="none" stroke="#57606a"{dashes}/>'
        yield f'<circle cx="{x2:.1f}" cy="{y2:.1f}" r="2.2" fill="#57606a"/>'
