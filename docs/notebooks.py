"""Keep the notebooks true: run their cells in order, and write, or compare, what they give.

``python docs/notebooks.py`` writes, ``python docs/notebooks.py --check`` exits with 1 where a notebook shows something
else. Figures with a decimal point (times, errors) differ between runs and machines, and are not compared. Cells are
plain Python; what a cell prints and the value of its last expression are its outputs, as Jupyter has them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import json
import linecache
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NOTEBOOKS = tuple(sorted(HERE.glob("*.ipynb")))
FIGURE = re.compile(r"\s*[-+]?\d+\.\d+(e[-+]?\d+)?")
"""A figure that is measured, with the blanks that align it."""


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs that its cells give today."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, number = [], 0
    with tempfile.TemporaryDirectory(prefix="fuse-notebook-") as folder, contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                number += 1
                outputs = run("".join(cell["source"]), names, number)
                cells.append({**cell, "execution_count": number, "outputs": outputs})
            else:
                cells.append(cell)
    return {**notebook, "cells": cells}


def run(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run one cell; its outputs in the format of notebooks."""
    file = os.path.abspath(f"cell_{number}.py")
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, file, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": lines(value._repr_html_()), "text/plain": lines(str(value))}
        outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return outputs


def lines(text: str) -> list[str]:
    """Text as notebooks hold it."""
    return text.splitlines(keepends=True)


def compared(notebook: dict[str, Any]) -> list[str]:
    """What a notebook shows, line by line, without the figures that are measured."""
    return [FIGURE.sub(" #", line) for line in json.dumps(notebook["cells"], indent=1).splitlines()]


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a notebook is stale")
    check = parser.parse_args().check
    stale = False
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        fresh = executed(notebook)
        shown, given = compared(notebook), compared(fresh)
        if shown == given:
            continue
        if not check:
            path.write_text(json.dumps(fresh, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(f"wrote {path.name}")
            continue
        stale = True
        print(
            "\n".join(difflib.unified_diff(shown, given, path.name, "given today", n=0, lineterm="")), file=sys.stderr
        )
        print("run python docs/notebooks.py to take this over", file=sys.stderr)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
