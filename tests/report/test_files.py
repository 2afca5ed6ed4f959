"""Results are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuse.errors import FuseError
from fuse.report.files import write


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    write(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_no_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FuseError, match="No space left on device"):
        write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_device_is_written_to_and_not_replaced() -> None:
    write(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()


def test_a_missing_folder_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FuseError, match=r"cannot write .*/nowhere/report\.json: No such file"):
        write(tmp_path / "nowhere" / "report.json", "text")
