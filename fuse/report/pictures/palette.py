"""The colours of a picture: one for each kind of operator, the same before and after fusion, in every format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """Fill, border and text, as CSS and Graphviz both read them."""

    fill: str
    border: str
    text: str = "#1f2328"


# Light fills with dark text keep labels readable in print and on screens; borders tell neighbours apart without colour.
COLOURS = {
    "gemm": Colour("#bfd7f2", "#2f6db0"),
    "convolution": Colour("#b9e0e6", "#1f7f8c"),
    "pointwise": Colour("#fbdcb4", "#c2761b"),
    "reduction": Colour("#c6e5bd", "#3f8f2f"),
    "movement": Colour("#e0cdf0", "#7b4fa3"),
    "random": Colour("#f6c9d8", "#b5416f"),
    "loop": Colour("#f4f6f8", "#57606a"),
    "region": Colour("#fff8ec", "#c2761b"),
    "repeat": Colour("#f6f8fa", "#8c959f"),
    "other": Colour("#dfe3e8", "#57606a"),
    "view": Colour("#ffffff", "#b6bdc5", "#57606a"),
    "input": Colour("#ffffff", "#1f2328"),
    "output": Colour("#ffffff", "#1f2328"),
}


def colour(kind: str) -> Colour:
    """The colour of a kind; unlisted kinds have that of ``other``.

    >>> colour("gemm").border
    '#2f6db0'
    """
    return COLOURS.get(kind, COLOURS["other"])
