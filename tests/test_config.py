"""Defaults from the nearest pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuse.config import defaults
from fuse.errors import FuseError


def configured(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_the_nearest_file_above_counts_and_lists_become_what_flags_take(tmp_path: Path) -> None:
    configured(tmp_path, '[tool.fuse]\ndevice = "v100"')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    configured(tmp_path / "a", '[tool.fuse]\nignore = ["no_ops", "dead_code"]\nmax-launches = 5')
    assert defaults(inner) == {"ignore": "no_ops,dead_code", "max_launches": 5}


def test_a_file_without_our_table_sets_nothing(tmp_path: Path) -> None:
    assert defaults(configured(tmp_path, "[tool.other]\nx = 1")) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.fuse]\nselct = []", "no setting 'selct'; did you mean 'select'"),
        ("[tool.fuse]\nseed = 'one'", "seed must be of type int, not 'one'"),
        ("[tool.fuse]\nseed = true", "seed must be of type int, not True"),
        ("[tool.fuse]\nignore = 'no_ops'", "ignore must be of type list"),
        ("[tool.fuse]\nignore = [1]", "ignore must be a list of names"),
        ("tool = 3", "has no table [tool.fuse]"),
        ("[tool.fuse", "cannot read"),
    ],
)
def test_mistakes_are_one_line_that_names_the_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FuseError) as caught:
        defaults(configured(tmp_path, text))
    assert "pyproject.toml" in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
