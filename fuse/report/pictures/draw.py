"""A report's two graphs as a picture: ``.dot``, ``.svg`` or a self-contained ``.html`` page.

dot installed        Graphviz lays the picture out
dot not installed    ``layered.py`` does, more plainly; the ``.dot`` text is written beside the picture for later
"""

from __future__ import annotations

import html
import shutil
import string
import subprocess
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fuse.errors import FuseError
from fuse.report.columns import as_text
from fuse.report.files import write
from fuse.report.pictures.dot import dot
from fuse.report.pictures.layered import svg
from fuse.report.pictures.sketch import sketch
from fuse.report.report import Report
from fuse.report.table import report_table

SUFFIXES = (".dot", ".svg", ".html")
LAYOUT_SECONDS = 60.0


@dataclass(frozen=True)
class DrawnFiles:
    """The written files, and a hint for the user in one line, if there is one."""

    written: tuple[Path, ...]
    hint: str | None


def check_suffix(path: Path) -> None:
    """Raise ``FuseError`` if ``path`` ends in no format that can be drawn.

    >>> check_suffix(Path("model.png"))
    Traceback (most recent call last):
    fuse.errors.FuseError: cannot draw model.png: its name must end in .dot, .svg or .html
    """
    if path.suffix not in SUFFIXES:
        raise FuseError(f"cannot draw {path}: its name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


def draw(report: Report, path: Path) -> DrawnFiles:
    """Draw the graphs of ``report``, before and after side by side, in the format that ``path`` ends in.

    Raises ``FuseError`` for another suffix and for a file that cannot be written.
    """
    check_suffix(path)
    before, after = report.before_sketch, sketch(report.graph)
    titles = (title("before", report.before.launches), title("after", report.after.launches))
    text = dot(before, after, titles)
    if path.suffix == ".dot":
        write(path, text)
        return DrawnFiles((path,), None)
    picture, problem = _laid_out(text)
    written, hint = [path], None
    if picture is None:
        picture = svg(before, after, titles)
        beside = path.with_suffix(".dot")
        write(beside, text)
        written.append(beside)
        hint = f"{problem}, so {path.name} is drawn plainly; install Graphviz, then: dot -Tsvg {beside} -o {path}"
    write(path, picture if path.suffix == ".svg" else _page(report, picture))
    return DrawnFiles(tuple(written), hint)


def title(when: str, launches: int) -> str:
    """The title of a graph.

    >>> title("before", 1200), title("after", 1)
    ('before: 1,200 launches', 'after: 1 launch')
    """
    return f"{when}: {launches:,} launch{'' if launches == 1 else 'es'}"


def _laid_out(text: str) -> tuple[str | None, str]:
    """Graphviz's SVG, or None, and the problem."""
    program = shutil.which("dot")
    if program is None:
        return None, "Graphviz (dot) is not installed"
    try:
        done = subprocess.run([program, "-Tsvg"], input=text.encode(), capture_output=True, timeout=LAYOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"Graphviz (dot) took more than {LAYOUT_SECONDS:.0f} s"
    if done.returncode != 0:
        return None, f"Graphviz (dot) failed with status {done.returncode}"
    return done.stdout.decode(), ""


def _page(report: Report, picture: str) -> str:
    """One HTML page with the table and the picture, which needs no network and runs no script."""
    template = string.Template(
        resources.files("fuse.report.pictures").joinpath("page.html").read_text(encoding="utf-8")
    )
    return template.substitute(
        title=html.escape(report.target),
        table=html.escape(as_text(report_table(report))),
        picture=picture[picture.index("<svg") :],  # the XML declaration of a file has no place inside a page
    )
