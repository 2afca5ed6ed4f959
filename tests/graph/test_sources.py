"""Which line an operator is said to come from."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

import fuse.graph.capture
from fuse.graph.sources import is_users, line_of, user_line


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("/home/me/model.py", True),
        (os.path.join(os.path.dirname(os.__file__), "site-packages", "somebody", "layers.py"), True),
        (torch.nn.__file__, False),
        (fuse.graph.capture.__file__, False),
        (os.__file__, False),
        ("<string>", False),
        ("<frozen importlib._bootstrap>", False),
        ("<eval_with_key>.3", False),
    ],
)
def test_a_users_file_is_one_outside_torch_the_library_and_generated_code(filename: str, expected: bool) -> None:
    assert is_users(filename) is expected


def test_the_line_is_the_callers() -> None:
    here = sys._getframe().f_lineno
    assert user_line() == f"test_sources.py:{here + 1}"


def test_the_line_is_the_innermost_one_of_the_user() -> None:
    seen: list[str] = []
    here = sys._getframe().f_lineno
    torch.utils._pytree.tree_map(lambda leaf: seen.append(user_line()), [1])
    assert seen == [f"test_sources.py:{here + 1}"]


def test_the_line_of_an_error_is_where_the_user_called_what_failed(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text("import torch\n\n\ndef run(x):\n    return torch.stack([x, x[1:]])\n")
    names: dict[str, object] = {}
    exec(compile(model.read_text(), str(model), "exec"), names)
    run = names["run"]
    assert callable(run)
    with pytest.raises(RuntimeError) as caught:
        run(torch.zeros(3))
    assert line_of(caught.value) == "model.py:5"


def test_an_error_from_nowhere_has_no_line() -> None:
    assert line_of(RuntimeError()) == ""
    assert not re.search(r"\d", line_of(ValueError("made here, never raised")))
