"""Results in a notebook: the printed text in a monospaced font, with markup escaped."""

from __future__ import annotations

import html


def preformatted(text: object) -> str:
    """``text`` as a piece of HTML; its first line, the title, is bold.

    >>> preformatted("a < b")
    '<pre style="line-height:1.35;white-space:pre;overflow-x:auto"><b>a &lt; b</b></pre>'
    """
    first, *others = html.escape(str(text)).split("\n")
    lines = "\n".join([f"<b>{first}</b>", *others])
    return f'<pre style="line-height:1.35;white-space:pre;overflow-x:auto">{lines}</pre>'
