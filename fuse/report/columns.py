"""Text in columns, and figures as text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 110


def as_text(table: RenderableType, color: bool = False) -> str:
    """The table as text without trailing blanks; ``color`` adds terminal codes for bold headings.

    >>> as_text(Text("launches"))
    'launches'
    """
    console = Console(
        file=io.StringIO(),
        width=WIDTH,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
    )
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def columns(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int = 1) -> Table:
    """A borderless table; from column ``numbers_from`` on, columns are aligned at the right.

    >>> print(as_text(columns(["kind", "before"], [["gemm", "128"], ["pointwise", "9"]])))
    kind       before
    gemm          128
    pointwise       9
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for position, title in enumerate(titles):
        number = position >= numbers_from
        table.add_column(title, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def scaled(value: int, unit: str = "") -> str:
    """A large figure in three digits, with the decimal prefix of its size.

    >>> scaled(1_234_567, "B"), scaled(999, "B"), scaled(50_000_000_000)
    ('1.23 MB', '999 B', '50.0 G')
    """
    if value < 1000:
        return f"{value} {unit}".rstrip()
    size, step = float(value), 0
    while size >= 999.5:
        size, step = size / 1000, step + 1
    return f"{size:.{3 - len(str(int(size)))}f} {' kMGTPE'[step]}{unit}"


def signed(value: int) -> str:
    """A difference with its sign, thousands separated.

    >>> signed(-1576), signed(3), signed(0)
    ('-1,576', '+3', '0')
    """
    return f"{value:+,}" if value else "0"
