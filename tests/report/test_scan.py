"""A scan: what its values are, the lines through the figures, and what it says."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuse import cli
from fuse.errors import FuseError
from fuse.report.columns import as_text
from fuse.report.timing.bench import BenchReport, bench
from fuse.report.timing.plot import plot
from fuse.report.timing.scan import ScanReport, fit, parse_scan, scan, scan_picture, scan_table

MODEL = """
import torch
T = 8
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = torch.nn.Linear(4, 4)
    def forward(self, x):
        h = torch.zeros(2, 4)
        for step in x:
            h = torch.tanh(self.recurrent(h) + step)
        return h
def get_init_inputs():
    return []
def get_inputs():
    return [torch.randn(T, 2, 4)]
"""


class Cell(nn.Module):
    """Three launches a step, and one for the first state."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(2, 4)
        for step in x:
            h = torch.tanh(self.recurrent(h) + step)
        return h


def measured(length: int) -> BenchReport:
    return bench(Cell().eval(), (torch.randn(length, 2, 4),), seconds=0.02, target="cell.py")


@pytest.fixture(scope="module")
def report() -> ScanReport:
    return scan(parse_scan("T=8:32:x2"), measured)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "cell.py"
    path.write_text(MODEL)
    return str(path)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("T=16:128:x2", (16, 32, 64, 128)),
        ("seq_length = 1:100:x10", (1, 10, 100)),
        ("T=4:11:3", (4, 7, 10)),
        ("T=0:2:1", (0, 1, 2)),
    ],
)
def test_values_grow_by_a_factor_or_by_a_step_up_to_the_last(text: str, values: tuple[int, ...]) -> None:
    assert parse_scan(text).values == values


@pytest.mark.parametrize("text", ["T", "T=16", "T=16:64", "16:64:x2", "T=1.5:4:x2", "T=16:64:y2", "T=-4:4:1"])
def test_another_form_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(FuseError, match="for example --scan T=16:256:x2"):
        parse_scan(text)


@pytest.mark.parametrize("text", ["T=16:16:x2", "T=16:8:x2", "T=0:8:x2", "T=1:8:x1", "T=1:8:0", "T=1:65:1"])
def test_too_few_and_too_many_values_are_refused(text: str) -> None:
    with pytest.raises(FuseError, match="must give 2 to 64 values"):
        parse_scan(text)


def test_a_line_is_found_exactly() -> None:
    found = fit([10, 20, 40, 1000], [2.5 + 0.125 * n for n in (10, 20, 40, 1000)])
    assert (found.fixed, found.each, found.misfit) == (pytest.approx(2.5), pytest.approx(0.125), pytest.approx(0))


def test_short_lengths_count_as_much_as_long_ones() -> None:
    lengths = [10, 100, 1000, 10_000]
    found = fit(lengths, [1.0 + 0.1 * n for n in lengths[:3]] + [1100.0])
    assert found.fixed == pytest.approx(1.0, abs=0.2)  # least squares of absolute errors give -4.6
    assert 0.02 < found.misfit < 0.1


def test_launches_are_observed_at_each_length_and_fitted(report: ScanReport) -> None:
    assert [one.observed_before for one in report.reports] == [25, 49, 97]
    assert [one.observed_after for one in report.reports] == [1, 1, 1]
    eager, fused = report.launches["eager"], report.launches["fused"]
    assert (eager.fixed, eager.each, eager.misfit) == (1, 3, 0)
    assert (fused.fixed, fused.each, fused.misfit) == (1, 0, 0)


def test_every_contender_has_a_line(report: ScanReport) -> None:
    assert set(report.milliseconds) == {"eager", "fused"}
    medians = [one.timings["fused"].milliseconds.median for one in report.reports]
    assert report.milliseconds["fused"] == fit(report.scan.values, medians)


def test_the_table_has_figures_first_calls_and_lines(report: ScanReport) -> None:
    text = as_text(scan_table(report))
    assert text.startswith("cell.py, forward, T from 8 to 32, measured")
    for expected in ("launches: eager", "first call s: fused", "a + b*T", "off by at most"):
        assert expected in text
    (line,) = (line for line in text.splitlines() if line.startswith("launches, eager"))
    assert line.split()[2:] == ["1", "3", "0.0", "%"]


def test_json_has_the_cases_and_the_fits(report: ScanReport) -> None:
    values = json.loads(json.dumps(report.to_dict()))
    assert [case["value"] for case in values["cases"]] == values["scan"]["values"] == [8, 16, 32]
    assert [case["observed"]["before"] for case in values["cases"]] == [25, 49, 97]
    assert values["fits"]["launches"]["eager"] == {"fixed": 1.0, "each": 3.0, "misfit": 0.0}


def test_the_picture_has_a_line_and_a_name_for_each_contender(report: ScanReport) -> None:
    root = ElementTree.fromstring(scan_picture(report))
    kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert (kinds.count("polyline"), kinds.count("circle")) == (2, 6)
    assert {"eager", "fused"} <= {element.text for element in root.iter()}


def test_names_of_lines_that_end_together_do_not_cover_each_other() -> None:
    root = ElementTree.fromstring(plot("<t>", [1, 2], {"one": [1, 5.0], "other": [2, 5.0]}))
    places = [float(element.get("y", 0)) for element in root.iter() if element.text in ("one", "other")]
    assert abs(places[0] - places[1]) >= 12


def test_equal_figures_are_drawn_too() -> None:
    ElementTree.fromstring(plot("flat", [1, 2], {"one": [10, 10]}))


def test_the_command_sets_the_constant_and_writes_the_picture(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "out.svg"
    flags = ["--scan", "T=4:8:x2", "--seconds", "0.02", "--json", "-q", "--graph", str(picture)]
    assert cli.run(["bench", model, *flags]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [case["observed"] for case in values["cases"]] == [{"before": 13, "after": 1}, {"before": 25, "after": 1}]
    ElementTree.parse(picture)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--scan", "steps=4:8:x2"], "sets no module-level constant 'steps'"),
        (["--graph", "out.svg"], "plots the times of a --scan"),
        (["--scan", "T=4:8:x2", "--graph", "out.png"], "into an .svg file"),
    ],
)
def test_faults_are_said_before_anything_is_measured(
    model: str, flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", model, *flags, "-q"]) == 2
    assert reason in capsys.readouterr().err


def test_the_budget_holds_at_every_length(model: str) -> None:
    flags = ["--scan", "T=4:8:x2", "--seconds", "0.02", "-q", "--ignore", "roll_loops,roll_whole_loops"]
    assert cli.run(["bench", model, *flags, "--max-launches", "9"]) == 1
    assert cli.run(["bench", model, *flags, "--max-launches", "99"]) == 0
