"""``show`` of models that read values, and of models that run eager: always a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fuse
from fuse import cli
from fuse.cost.observe import CountingMode
from fuse.errors import FuseError
from fuse.graph.values.evaluating import NoData

READS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        {body}

def get_init_inputs():
    return []

def get_inputs():
    return [torch.randn(4, 8)]
"""


class Replaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        y.data = y * 2
        return y.sum()


Shown = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shown:
    """The report of a model whose ``forward`` ends so, and what was said besides."""

    def show(body: str, *flags: str) -> tuple[dict[str, Any], str]:
        file = tmp_path / "model.py"
        file.write_text(READS.format(body=body))
        status = cli.run(["show", str(file), "--json", *flags])
        told = capsys.readouterr()
        assert status == 0, told.err
        return json.loads(told.out), told.err

    return show


def test_a_file_that_reads_values_is_loaded_for_real_with_a_note(shown: Shown) -> None:
    report, notes = shown("y = y if y.sum() > -1e9 else -y\n        return y.relu() / y.abs().max().item()")
    assert "loaded for real, with its weights allocated, because forward reads a value" in notes
    assert [(one["guard"], one["count"]) for one in report["reads"]] == [("truth", 1), ("none", 1)]
    assert report["fallbacks"] == []
    assert report["after"]["launches"] < report["before"]["launches"]


@pytest.mark.parametrize("flags", [(), ("--train",)], ids=["inference", "train"])
def test_what_runs_eager_is_counted_as_eager_launches_it(shown: Shown, flags: tuple[str, ...]) -> None:
    report, _ = shown("y = y.tanh(); y.data = y * 2; return y.sum()", *flags)
    assert report["before"] == report["after"]
    assert "assigns the .data of a tensor" in report["fallbacks"][0]["reason"]
    assert ("backward" in report) == bool(flags)


def test_the_count_of_eager_is_what_eager_launches_and_the_model_stays_as_it_was() -> None:
    model, x = Replaced(), torch.randn(4, 8)
    report = fuse.show(model, (x,))
    with torch.no_grad(), CountingMode() as counting:
        model(x)
    assert report.before.launches == report.after.launches == counting.launches
    assert "runs eager as it is" in str(report)


def test_the_table_says_what_is_read_and_how_it_is_guarded() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[: int(x.sum())] * 2

    text = str(fuse.show(Reads(), (torch.ones(5),)))
    assert "values read" in text
    assert "the number" in text


def test_fake_tensors_have_no_values() -> None:
    with FakeTensorMode():
        model, x = Replaced(), torch.randn(4, 8)
    with pytest.raises(NoData):
        fuse.show(model, (x,))


def test_what_fails_in_eager_too_is_an_error() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.sum() > 1e9, "too small"
            return x

    with pytest.raises(FuseError, match="AssertionError: too small"):
        fuse.show(Fails(), (torch.ones(3),))
