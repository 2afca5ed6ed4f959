"""One HTML page to walk through a report: every rewrite, the graph, source and kernels.

    report as JSON (schema 2)  +  viewer/*.js, viewer/viewer.css  ->  page.html, which needs no network

The page's policy allows only this script and this style, by their hashes. The model's data is JSON text that cannot end
its element; the page shows it as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from fuse.cost import profiles
from fuse.errors import FuseError
from fuse.report.files import write

SCRIPTS = (
    "data", "replay", "tree", "layout", "draw", "code", "list",
    "app", "steps", "layers", "selection", "details", "panels", "search", "address", "compare", "begin",
)  # fmt: skip
"""The parts of the page's script, in the order in which they are joined."""


def view(report: Mapping[str, Any], path: Path) -> None:
    """Write the page of a report, which ``Report.to_dict`` gave or ``fuse show --json`` saved, to ``path``.

    Raises ``FuseError`` for a report without its ``record``, and for a file that cannot be written.
    """
    if path.suffix != ".html":
        raise FuseError(f"cannot write {path}: its name must end in .html")
    write(path, page(str(report["target"]), _sheets(report), report["device"]))


def page(title: str, sheets: Sequence[Mapping[str, Any]], device: str, **more: Any) -> str:
    """The page of some reports, each a ``name`` and a ``report``.

    >>> report = {"record": {}, "target": "</script><script>"}
    >>> "</script><script>" in page("x", [{"name": "forward", "report": report}], "cpu")
    False
    """
    profile = asdict(profiles.get(device))
    rates = {name: profile[name] for name in ("launch_seconds", "bytes_per_second")}
    data = {
        "title": title,
        "sheets": list(sheets),
        "profile": {**rates, "flops_per_second": profile["flops_per_second"][torch.float32]},
        **more,
    }
    script = "(() => {\n'use strict';\n" + "\n".join(_part(f"{name}.js") for name in SCRIPTS) + "})();\n"
    style = _part("viewer.css")
    return string.Template(_part("page.html")).substitute(
        title=html.escape(title),
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        report=embedded(data),
    )


def embedded(data: object) -> str:
    """JSON to embed in a page: it cannot end its element, begin another one, or break a line of script.

    >>> embedded({"a": "</script>"})
    '{"a":"\\\\u003c/script>"}'
    """
    text = json.dumps(data, separators=(",", ":"))  # ASCII: U+2028 and its like are escaped already
    return text.replace("<", "\\u003c")


def _sheets(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "record" not in report:
        raise FuseError("the report has no record of its rewrites; save it with fuse show --json, or use record=True")
    sheets = [{"name": "forward", "report": {name: part for name, part in report.items() if name != "backward"}}]
    if "backward" in report:
        sheets.append({"name": "backward", "report": report["backward"]})
    return sheets


def _part(name: str) -> str:
    return resources.files("fuse.report").joinpath("viewer", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
