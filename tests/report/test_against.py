"""What ``torch.compile`` does to a model, beside what fuse does: launches by line, graph breaks, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse import cli
from fuse.errors import FuseError
from fuse.report.report import TorchCompiled
from fuse.report.timing.against import compiled

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = torch.tanh(self.one(x)) * 2
        if y.sum() > 0:
            y = y + 1
        return torch.sigmoid(self.other(y))


def get_init_inputs():
    return []


def get_inputs():
    return [torch.ones(4, 8)]
"""


class Products(nn.Module):
    """Two products with elementwise operators between them, and a sort, which Inductor leaves to eager."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x)) * 2
        return torch.sigmoid(self.other(y)).sort(dim=-1).values


@pytest.fixture(scope="module")
def products() -> TorchCompiled:
    return compiled(Products().eval(), (torch.randn(4, 8),))


def line(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{Path(__file__).name}:{1 + max(n for n, one in enumerate(lines) if one.strip().startswith(text))}"


def test_launches_are_told_by_line(products: TorchCompiled) -> None:
    assert products.obstacle == ""
    assert products.graphs == 1
    assert products.breaks == ()
    assert products.launches == sum(kernel.launches for kernel in products.kernels) == sum(products.lines.values())
    first, second = line("y = torch.tanh(self.one(x)) * 2"), line("return torch.sigmoid(self.other(y)).sort")
    assert set(products.lines) <= {first, second, ""}
    assert products.lines[first] == 2  # the product, the kernel
    assert any("aten.tanh" in kernel.operators and kernel.lines == (first,) for kernel in products.kernels)


def test_refusals_have_reasons_and_lines(products: TorchCompiled) -> None:
    assert products.refusals
    assert all(one.reason and one.count > 0 and "%" not in one.reason for one in products.refusals)
    assert any(source.startswith(Path(__file__).name) for one in products.refusals for source in one.lines)
    assert any("library" in one.reason for one in products.refusals)


def test_a_graph_break_is_told_with_its_reason_and_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "reads.py"
    path.write_text(MODEL)
    assert cli.run(["show", str(path), "--against", "compile", "--json"]) == 0
    shown = capfd.readouterr()
    made = json.loads(shown.out)["against"]["compile"]
    assert made["graphs"] == 2
    (broken,) = made["breaks"]
    assert broken["source"] == "reads.py:13"
    assert broken["reason"].startswith("Python branches on a value of the graph")
    assert all(text.startswith("fuse: ") for text in shown.err.splitlines())  # no other compiler's log
    assert cli.run(["show", str(path), "--against", "compile", "-q"]) == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    assert "torch.compile broke the graph at  because" in shown.out
    assert "torch.compile did not fuse, because" in shown.out


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


def test_what_fails_is_said_in_one_line() -> None:
    made = compiled(Failing(), (torch.ones(2),))
    assert "no" in made.obstacle
    assert "\n" not in made.obstacle
    assert made.launches == 0


def test_what_cannot_go_together_is_refused() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.raises(FuseError, match="there is compile"):
        fuse.show(model, (x,), against=("eager",))
    with pytest.raises(FuseError, match="leave --train out"):
        fuse.show(model, (x,), against=("compile",), train=True)
    with pytest.raises(FuseError, match="leave --fuel out"):
        fuse.show(model, (x,), measure=True, fuel=1)
