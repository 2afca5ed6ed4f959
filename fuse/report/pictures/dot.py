"""Two sketches side by side as Graphviz text.

    before: 771 launches          after: 195 launches
    +- x 64 ------------+         +- x 64 -------------+
    | addmm -> ... mul  |         | addmm -> [12 -> 1] |
    +-------------------+         +--------------------+

All text from the model goes through ``_text``: names may hold quotes, angle brackets or backslashes.
"""

from __future__ import annotations

import html

import graphviz

from fuse.report.pictures.palette import colour
from fuse.report.pictures.reading import Mark
from fuse.report.pictures.sketch import Box, Sketch, boxes_of, marks_of

FONT = "Helvetica,Arial,sans-serif"


def dot(before: Sketch, after: Sketch, titles: tuple[str, str]) -> str:
    """Graphviz source of both sketches, each under its title, with the colours explained below.

    >>> empty = Sketch({}, (), ())
    >>> "before: 2 launches" in dot(empty, empty, ("before: 2 launches", "after: 1 launch"))
    True
    """
    picture = graphviz.Digraph(
        "fuse",
        graph_attr={
            "rankdir": "TB",
            "fontname": FONT,
            "fontsize": "11",
            "nodesep": "0.18",
            "ranksep": "0.28",
            "labelloc": "b",
            "label": _legend(before, after),
        },
        node_attr={
            "fontname": FONT,
            "fontsize": "12",
            "shape": "box",
            "style": "rounded,filled",
            "margin": "0.20,0.04",  # fonts in place of Helvetica may be a sixth wider
        },
        edge_attr={"color": "#57606a", "arrowsize": "0.6", "penwidth": "0.9"},
    )
    for prefix, sketch, title in (("before", before, titles[0]), ("after", after, titles[1])):
        with picture.subgraph(name=f"cluster_{prefix}") as half:
            half.attr(label=f"<<b>{_text(title)}</b>>", labelloc="t", fontsize="16", penwidth="0", margin="18")
            _draw_parts(half, sketch, sketch.parts, prefix)
            _place_titles(half, sketch, prefix)
            for arrow in sketch.arrows:
                thin = sketch.marks[arrow.start].kind == "view" or sketch.marks[arrow.stop].kind == "view"
                half.edge(
                    f"{prefix}{arrow.start}",
                    f"{prefix}{arrow.stop}",
                    penwidth="0.5" if thin else None,
                    style="dashed" if arrow.carried else None,
                    constraint="false" if arrow.carried else None,
                )
    return str(picture.source)


def _draw_parts(into: graphviz.Digraph, sketch: Sketch, parts: tuple[int | Box, ...], prefix: str) -> None:
    """The marks and boxes of one level."""
    for part in parts:
        if isinstance(part, int):
            _draw_mark(into, f"{prefix}{part}", sketch.marks[part])
            continue
        look = colour(part.kind)
        title = _title_name(part, prefix)
        with into.subgraph(name=f"cluster_{title}") as frame:
            frame.attr(
                label="",
                style="rounded,filled" + (",dashed" if part.kind == "repeat" else ""),
                fillcolor=look.fill,
                color=look.border,
                penwidth="1.0" if part.kind == "repeat" else "2.0",
                margin="10",
            )
            frame.node(
                title,
                label=f"<<b>{_text(part.label)}</b>>",
                shape="plaintext",
                style="",
                fontcolor=look.border,
                height="0.1",
                margin="0.02",
            )
            _draw_parts(frame, sketch, part.parts, prefix)


def _place_titles(half: graphviz.Digraph, sketch: Sketch, prefix: str) -> None:
    """Keep the title of every box below the sources of its arrows, and above its contents.

    The title is a node, not a Graphviz label: arrows bend around nodes, but cross labels.
    """
    uses: dict[int, list[int]] = {}
    for arrow in sketch.arrows:
        if not arrow.carried:
            uses.setdefault(arrow.stop, []).append(arrow.start)
    for box in boxes_of(sketch.parts):
        title, inside = _title_name(box, prefix), dict.fromkeys(marks_of(box))
        entering = dict.fromkeys(start for mark in inside for start in uses.get(mark, ()) if start not in inside)
        for start in entering:
            half.edge(f"{prefix}{start}", title, style="invis")
        for mark in inside:
            if not any(start in inside for start in uses.get(mark, ())):
                half.edge(title, f"{prefix}{mark}", style="invis")


def _title_name(box: Box, prefix: str) -> str:
    """A name of its own for each box: by the first mark inside and, where boxes are nested, by its kind."""
    return f"{prefix}_{box.kind}_{next(marks_of(box))}"


def _draw_mark(into: graphviz.Digraph, name: str, mark: Mark) -> None:
    look = colour(mark.kind)
    style = {
        "view": {"shape": "plaintext", "style": "", "fontsize": "9", "height": "0.1", "margin": "0.02"},
        "input": {"shape": "box", "style": "filled", "penwidth": "1.4"},
        "output": {"shape": "box", "style": "filled", "penwidth": "1.4"},
    }.get(mark.kind, {})
    into.node(
        name,
        label=_label(mark),
        tooltip=_text(f"{mark.label} {mark.detail} {mark.source}".strip()),
        fillcolor=look.fill,
        color=look.border,
        fontcolor=look.text,
        **style,
    )


def _label(mark: Mark) -> str:
    """The operator's name, and smaller below it shape and user line; a view shows its name alone."""
    name = _text(mark.label if mark.count == 1 else f"{mark.label}  x {mark.count}")
    if mark.kind == "view":
        return f"<{name}>"
    below = "<br/>".join(_text(line) for line in (mark.detail, mark.source) if line)
    if not below:
        return f"<{name}>"
    return f'<{name}<br/><font point-size="9" color="#57606a">{below}</font>>'


def _legend(before: Sketch, after: Sketch) -> str:
    """One coloured cell for each kind that occurs."""
    present = {mark.kind for sketch in (before, after) for mark in sketch.marks.values()}
    kinds = sorted(present - {"input", "output", "view"})
    cells = "".join(f'<td bgcolor="{colour(kind).fill}" color="{colour(kind).border}"> {kind} </td>' for kind in kinds)
    note = "<td border='0'>thin: no launch (views) &nbsp; dashed: to the next step &nbsp; weights not drawn</td>"
    return f'<<table border="0" cellborder="1" cellspacing="6" cellpadding="3"><tr>{cells}{note}</tr></table>>'


def _text(text: str) -> str:
    """Text for a Graphviz HTML-like label or tooltip: markup escaped, control characters (invalid in XML) replaced."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    # A backslash would begin an escape sequence of Graphviz (``\N`` is the node's name) even inside HTML-like labels.
    return html.escape(printable).replace("\\", "&#92;")
