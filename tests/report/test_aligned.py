"""Two reports laid side by side: lines by their text, operators of a line by what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fuse
from fuse.errors import FuseError
from fuse.graph.loading.load import load
from fuse.report.aligned import alignment, diff_page, state_of

MODEL = """import torch
from torch import nn

example_inputs = (torch.ones(4, 8),)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        x = torch.tanh(x){}
        return x.sum(1)


model = Model
"""
CHANGED = MODEL.replace("import torch\n", "import torch\n\n# one line more\n", 1)


def saved(folder: Path, text: str, *, fuel: int | None = None) -> dict[str, Any]:
    path = folder / "model.py"
    path.write_text(text)
    loaded = load(str(path), real=False)
    report = fuse.show(loaded.model, loaded.args, loaded.kwargs, target="model.py", record=True, fuel=fuel)
    values: dict[str, Any] = json.loads(json.dumps(report.to_dict()))
    recording = report.ledger.recording
    assert recording is not None
    assert state_of(values["record"]).text() == recording.after().text()
    return values


def rows(found: dict[str, Any]) -> dict[str, list[str]]:
    return {one["title"]: [row["text"] for row in one["rows"]] for one in found["differences"] if one["rows"]}


def test_equal_reports_correspond_in_everything(tmp_path: Path) -> None:
    report = saved(tmp_path, MODEL.format(""))
    found = alignment(report, report)
    assert rows(found) == {}
    assert all(one == other for one, other in (*found["lines"], *found["nodes"]))
    assert len(found["nodes"]) == sum(
        len(state_of(report["record"]).nodes(graph)) for graph in state_of(report["record"]).graphs()
    )


def test_lines_that_moved_are_the_same_lines(tmp_path: Path) -> None:
    old, new = saved(tmp_path, MODEL.format("")), saved(tmp_path, CHANGED.format(""))
    found = alignment(old, new)
    assert ("model.py:14", "model.py:16") in found["lines"]
    assert rows(found) == {}


def test_an_operator_more_appears_under_its_line(tmp_path: Path) -> None:
    old, new = saved(tmp_path, MODEL.format("")), saved(tmp_path, CHANGED.format(".cumsum(0)"))
    found = rows(alignment(old, new))
    assert "cumsum  model.py:16" in found["operators that appeared"]
    assert any(text.startswith("model.py:14 ") for text in found["launches of a line"])


def test_what_fused_is_the_same_operator_as_what_did_not(tmp_path: Path) -> None:
    old, new = saved(tmp_path, MODEL.format(""), fuel=0), saved(tmp_path, MODEL.format(""))
    found = rows(alignment(old, new))
    assert [text.split()[0] for text in found["operators that appeared"]] == ["region"]
    assert "operators that went" not in found


def test_a_record_is_read_back_after_any_rewrite(tmp_path: Path) -> None:
    values = saved(tmp_path, MODEL.format(""))
    assert state_of(values["record"], 0).text() != state_of(values["record"]).text()


def test_a_report_without_its_record_is_named(tmp_path: Path) -> None:
    values = saved(tmp_path, MODEL.format(""))
    without = {name: value for name, value in values.items() if name != "record"}
    with pytest.raises(FuseError, match=r"b\.json has no record"):
        diff_page(values, without, ("a.json", "b.json"), tmp_path / "diff.html")
    with pytest.raises(FuseError, match=r"must end in \.html"):
        diff_page(values, values, ("a.json", "b.json"), tmp_path / "diff.svg")
