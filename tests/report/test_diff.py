"""Saved reports compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fuse
from fuse.errors import FuseError
from fuse.report.columns import as_text
from fuse.report.diff import compare, diff_table, read


def saved(fuel: int | None) -> dict[str, Any]:
    class Duplicates(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) + torch.tanh(x)

    return fuse.show(Duplicates(), (torch.ones(4),), passes=["common_subexpressions"], fuel=fuel).to_dict()


def test_equal_reports_differ_in_nothing() -> None:
    assert compare(saved(None), saved(None)) == {"launches": [2, 2], "by_kind": {}, "counts": {}, "fired": {}}


def test_a_pass_that_no_longer_fires_shows_in_launches_kinds_and_fired() -> None:
    changes = compare(saved(None), saved(0))
    assert changes["launches"] == [2, 3]
    assert changes["by_kind"] == {"pointwise": [2, 3]}
    assert changes["fired"] == {"common_subexpressions": [1, 0]}
    text = as_text(diff_table(changes, "old.json", "new.json"))
    assert [line.split() for line in text.splitlines() if line.startswith("launches")] == [["launches", "2", "3", "+1"]]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema_version": 7}', '"report"'])
def test_what_is_no_report_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(FuseError, match=r"base\.json"):
        read(path)


def test_a_missing_report_says_how_to_save_one(tmp_path: Path) -> None:
    with pytest.raises(FuseError, match="fuse show --json -o"):
        read(tmp_path / "base.json")


def test_a_saved_report_is_read_back(tmp_path: Path) -> None:
    report = saved(None)
    path = tmp_path / "base.json"
    path.write_text(json.dumps(report))
    assert read(path) == report
