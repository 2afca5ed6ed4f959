"""The verb ``fuse precision``: tables, JSON, CSV and page."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fuse.cli import run

MODEL = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)
    def forward(self, x, ids):
        y = torch.tanh(self.inner(x))
        place = ids.to(x.dtype)
        return y * torch.cos(place[:, None] * 0.5)
def get_init_inputs(): return []
def get_inputs(): return [torch.randn(600, 16), torch.arange(600)]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "places.py"
    path.write_text(MODEL)
    return path


def test_the_lossy_cast_is_named_by_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, page = tmp_path / "errors.csv", tmp_path / "errors.html"
    assert run(["precision", str(model), "--csv", str(table), "--html", str(page), "-q"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "errs by more than its dtype explains is aten._to_copy.default" in told
    assert "cast from int64 to bfloat16) at places.py:9" in told
    assert "fuse.compile(model, precision=fuse.Precision('bf16', keep=(" in told
    assert "'places.py:9:to'" in told
    rows = list(csv.DictReader(table.open()))
    assert {row["Graph"] for row in rows} == {"eager", "fused"}
    named = [row["Source"] for row in rows if row["Beyond"] == "YES" and row["Graph"] == "eager"]
    assert named == ["places.py:9"]
    assert all(float(row["CosineSimilarity"]) <= 1 for row in rows)
    text = page.read_text()
    assert text.count("<tr") == len(rows) + 1
    assert "http" not in text


def test_json_holds_every_operator_and_the_code(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["precision", str(model), "--json", "-q", "--target", "cosine>=0.9999"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["goal"] == "cosine>=0.9999"
    first = next(one for one in found["eager"]["operators"] if one["beyond"])
    assert first["name"] == found["eager"]["first_beyond"]
    assert first["source"] == "places.py:9"
    assert "places.py:9:to" in found["keep"]["keep"]
    assert found["keep"]["confirmed"]["cosine"] >= 0.9999


@pytest.mark.parametrize("target", ["sqnr<=40", "psnr>=3", "sqnr>=x"])
def test_a_target_that_is_none_is_an_error(model: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["precision", str(model), "--target", target]) == 2
    assert target in capsys.readouterr().err


MIXED = """
import torch
class Model(torch.nn.Module):
    def forward(self, x, ids):
        for _ in range(3):
            x = torch.relu(x * 2) + ids.to(x.dtype)
        return x.float()
def get_init_inputs(): return []
def get_inputs(): return [torch.randn(64, 16).bfloat16(), torch.arange(16)]
"""


def test_show_lists_casts_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(MIXED)
    assert run(["show", str(path), "--json", "--ignore", "fuse_pointwise"]) == 0
    casts = json.loads(capsys.readouterr().out)["casts"]
    assert [(one["source"], one["casts"], one["before"], one["bytes"]) for one in casts] == [
        ("mixed.py:7", "bfloat16 to float32", 1, 64 * 16 * 6),
        ("mixed.py:6", "int64 to bfloat16", 3, 3 * 16 * 10),
    ]
    assert casts[1]["after"] == 1  # equal casts are one
    assert casts[1]["microseconds"] >= 3
    assert run(["show", str(path)]) == 0
    assert "casts by line" in capsys.readouterr().out


def test_a_number_that_the_dtype_cannot_hold_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.py"
    path.write_text(MIXED.replace("x * 2", "x * 1e9").replace("randn(64, 16).bfloat16()", "randn(64, 16)"))
    assert run(["precision", str(path), "--dtype", "f16"]) == 2
    told = capsys.readouterr().err
    assert "nothing can be measured: aten.mul.Tensor at large.py:6 is given 1000000000.0" in told
    assert "eager mode" not in told
