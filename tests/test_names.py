"""One name, one thing: no two classes that another file may import are called alike."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent

STILL_SHARED = {
    "Form": 2,  # of loops, and of patterns
    "Loop": 2,  # of a graph, and of a kernel
    "Program": 2,  # of a kernel as values, and of a graph as steps
}
"""Names that more than one class has, and how many have each: a list that only gets shorter."""


def test_no_two_classes_have_one_name() -> None:
    files = [*(ROOT / "fuse").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
    classes = (node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef))
    count = Counter(one.name for one in classes if not one.name.startswith("_"))
    assert {name: number for name, number in count.items() if number > 1} == STILL_SHARED
