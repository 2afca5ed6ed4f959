"""One name, one thing: no two classes that another file may import are called alike."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_no_two_classes_have_one_name() -> None:
    files = [*(ROOT / "fuse").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
    classes = (node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef))
    count = Counter(one.name for one in classes if not one.name.startswith("_"))
    assert [name for name, number in count.items() if number > 1] == []
