"""The example models that come with fuse: the files of ``models/``, as they are."""

from __future__ import annotations

import ast
import difflib
from importlib import resources

from fuse.errors import FuseError


def summaries() -> dict[str, str]:
    """The names of the examples, and the first line of the docstring of each.

    >>> summaries()["lstm_loop"]
    'An LSTM written as a plain Python loop over time.'
    """
    return {name: (ast.get_docstring(ast.parse(source(name))) or "").partition("\n")[0] for name in _names()}


def source(name: str) -> str:
    """The text of an example; ``FuseError`` with a suggestion for an unknown one.

    >>> "class Model" in source("mlp") or "model = " in source("mlp")
    True
    """
    if name not in _names():
        close = difflib.get_close_matches(name, _names(), n=1)
        advice = f"did you mean {close[0]!r}?" if close else "fuse example lists them"
        raise FuseError(f"there is no example {name!r}; {advice}")
    return resources.files("fuse.models").joinpath(f"{name}.py").read_text(encoding="utf-8")


def _names() -> list[str]:
    files = [entry.name for entry in resources.files("fuse.models").iterdir()]
    return sorted(name.removesuffix(".py") for name in files if name.endswith(".py"))
