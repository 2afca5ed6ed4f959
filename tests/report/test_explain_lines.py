"""``fuse explain`` of a line and of all patterns: what was tried, without knowing a name."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch
from torch import randn

from fuse import cli, verbs
from fuse.errors import FuseError
from fuse.graph.function import Function
from fuse.report.explain_lines import explain_lines, lines_of, nearest_patterns

FILE = """
    import torch

    class Model(torch.nn.Module):
        def forward(self, x, y):
            gate = torch.sigmoid(x) * y
            return gate.sort(-1).values

    def get_init_inputs(): return []
    def get_inputs(): return [torch.randn(4, 8), torch.randn(4, 8)]
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "gate.py").write_text(textwrap.dedent(FILE))
    return str(tmp_path / "gate.py")


def test_a_line_has_everything_that_was_tried_on_its_operators(model, capsys, registered):
    @registered
    def gated(x, y):
        return torch.sigmoid(x) * torch.tanh(y)

    assert cli.run(["explain", model, "gate.py:6", "--json"]) == verbs.GOOD
    told = json.loads(capsys.readouterr().out)
    assert told["operators"] == ["sigmoid", "mul"]
    by_name = {one["pattern"] or one["pass_name"]: one for one in told["tried"]}
    assert by_name["fuse_pointwise"]["fired"]
    assert cli.run(["explain", model, "gate.py:6"]) == verbs.GOOD
    assert "sigmoid, mul" in capsys.readouterr().out


def test_a_pattern_that_looked_at_the_line_says_why_it_stayed_out(registered):
    @registered
    def gated(x, y):
        return torch.tanh(torch.sigmoid(x) * y)

    def forward(x, y):
        z = torch.sigmoid(x) - y
        return torch.tanh(z) * torch.sigmoid(y)

    line = forward.__code__.co_firstlineno + 1
    found = explain_lines(Function(forward), (randn(4), randn(4)), None, lines_of(f"test_explain_lines.py:{line}"))
    (reason,) = {one.reason for one in found.tried if one.pattern == "gated"}
    assert reason.startswith("structure: ")
    with pytest.raises(FuseError, match=r"has no operator on net\.py:3; it has some on test_explain_lines\.py"):
        explain_lines(Function(forward), (randn(4), randn(4)), None, lines_of("net.py:3"))


def test_patterns_are_ranked_by_how_close_they_come(model, capsys, registered):
    @registered(enabled=False)
    def far(x, y, z):
        return torch.erf(torch.cos(torch.sigmoid(x) + z) * y)

    @registered(enabled=False)
    def near(x, y):
        return torch.tanh(torch.sigmoid(x) * y)

    @registered
    def there(x, y):
        return torch.sigmoid(x) * y

    close = nearest_patterns(Function(lambda x, y: torch.sigmoid(x) * y), (randn(4), randn(4)), None)
    ours = [one.pattern for one in close if one.pattern in ("far", "near", "there")]
    assert ours == ["there", "near", "far"]
    assert cli.run(["explain", model, "--near", "100"]) == verbs.GOOD
    printed = capsys.readouterr().out
    assert printed.index("near (off)") < printed.index("far (off)")
    assert cli.run(["explain", model, "--near", "1"]) == verbs.GOOD
    assert "far (off)" not in capsys.readouterr().out


def test_neither_and_both_are_errors(model, capsys):
    assert cli.run(["explain", model]) == cli.ERROR
    assert "say what to explain" in capsys.readouterr().err
    assert cli.run(["explain", model, "CrossEntropy", "--near", "3"]) == cli.ERROR
