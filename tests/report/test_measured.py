"""Times of lines, nodes and kernels: every launch that is measured is one of the report's."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse import cli
from fuse.graph.loading.load import load
from fuse.report.report import Report
from fuse.report.timing.heap import held_by_libraries

LSTM = str(Path(__file__).parents[2] / "models" / "lstm_loop.py")


class Steps(nn.Module):
    """A loop, a product, an operator that fuse calls from Python, and one that writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(5):
            h = torch.tanh(self.first(h)) * torch.sigmoid(x)
        self.seen.add_(h)
        return torch.sort(self.second(h), dim=-1).values.cumsum(0)


@pytest.fixture(scope="module")
def shown() -> Report:
    torch.manual_seed(0)
    return fuse.show(Steps().eval(), (torch.randn(4, 8),), measure=True)


def test_every_launch_gets_its_time(shown: Report) -> None:
    assert shown.measured is not None
    assert shown.record is not None
    before, after = shown.measured.before, shown.measured.after
    assert (before.obstacle, after.obstacle) == ("", "")
    assert (before.launches, after.launches) == (shown.before.launches, shown.after.launches)
    launching = {row["id"] for row in shown.record["start"] if row.get("launches")}
    assert {node for node, _ in before.rows} == launching
    for side in (before, after):
        assert sum(side.lines.values()) == pytest.approx(side.busy, rel=0.3)  # medians of each, and of the sum
        assert 0 < side.busy <= side.span
        assert sum(time for _, time in side.rows) == pytest.approx(sum(side.lines.values()), rel=0.3)


def test_lines_and_kernels_carry_times_in_the_record(shown: Report) -> None:
    assert shown.record is not None
    timed = [one for one in shown.record["lines"] if one["before"]["launches"]]
    assert all(one["before"]["microseconds"] > 0 for one in timed)
    assert all(one["after"]["microseconds"] > 0 for one in shown.record["lines"] if one["after"]["launches"])
    assert shown.record["kernels"]
    assert all(kernel["microseconds"] > 0 for kernel in shown.record["kernels"])
    assert shown.to_dict()["measured"]["before"]["launches"] == shown.before.launches


def test_nothing_is_measured_unasked() -> None:
    report = fuse.show(nn.Tanh(), (torch.ones(3),), record=True)
    assert report.measured is None
    assert report.record is not None
    assert "microseconds" not in report.record
    assert "measured" not in report.to_dict()


class Growing(nn.Module):
    """A call that launches more each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(self.calls):
            x = x.tanh()
        return x


def test_launches_that_are_not_those_of_the_report_get_no_time() -> None:
    report = fuse.show(Growing(), (torch.ones(3),), measure=True)
    assert report.measured is not None
    assert "not the 1 captured" in report.measured.before.obstacle
    assert report.measured.before.rows == []
    assert "no times of lines before" in str(report)


def test_the_command_prints_microseconds_beside_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show", LSTM, "--set", "seq_length=8", "--measure", "-q"]) == 0
    out = capsys.readouterr().out
    assert "us before" in out
    assert "measured, by the profiler's clock" in out


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="the counter is for glibc, built by cc")
def test_what_eagers_libraries_hold_is_observed(tmp_path: Path) -> None:
    """A product whose operands a library packs holds more than torch allocates, an elementwise operator does not."""
    text = "import torch\n\nmodel = torch.nn.{}\nexample_inputs = (torch.ones(512, 512),)\n"
    held = {}
    for name, layer in (("product", "Linear(512, 512)"), ("elementwise", "Tanh()")):
        file = tmp_path / f"{name}.py"
        file.write_text(text.format(layer))
        held[name] = held_by_libraries(str(file), (), (), load(str(file), real=True))
    assert held["product"] is not None
    assert held["elementwise"] is not None
    assert held["elementwise"] < 200_000 < held["product"]
