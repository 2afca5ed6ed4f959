"""``fuse explain`` names the true reason of a non-match: twenty-one of them, each made to have one reason only."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, randn

import fuse
from fuse import cli, verbs
from fuse.graph.function import Function
from fuse.report.explain import Explanation, drawing, explain
from fuse.rewrite.patterns.definition import define


def swish(x):
    return x * torch.sigmoid(x)


def tail(x, w, skip):
    return torch.relu(x @ w + skip)


def joined(x, y):
    return torch.cat([torch.exp(x), torch.exp(y)], 1)


def scaled(x):
    return torch.tanh(x * 2)


def turned(x, y):
    return torch.tanh(torch.exp(x).transpose(-2, -1) + y)


def two(x, z):
    y = torch.exp(x)
    return y, torch.tanh(z) * y


def wide(x=fuse.tensor(..., 8)):
    return x * torch.sigmoid(x)


def double(x=fuse.tensor(dtype=torch.float64)):
    return x * torch.sigmoid(x)


class Judged:
    def pattern(self, x):
        return x * torch.sigmoid(x)

    def check(self, m):
        return m.fail("only squares", m["x"])


class Shrunk:
    def pattern(self, x):
        return x * torch.sigmoid(x)

    def replace(self, x):
        return torch.sigmoid(x)[:1]


def dropped(x):
    return torch.relu(F.dropout(x, 0.5, training=True)) * 2


def written(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    x.add_(1)
    return x * gate


def read_again(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ w
    return torch.relu(product + s), product.exp()


def around(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.exp(x)
    return y.neg(), torch.tanh(y.sin()) * y


TAIL = randn(3, 4), randn(4, 5), randn(3, 5)
SQUARE = randn(3, 3, 3), randn(3, 3, 3)
PAIR = randn(3, 4), randn(3, 4)

CASES: dict[str, tuple[Any, Callable[..., Any], tuple[Tensor, ...], str, str, tuple[int, int]]] = {
    "another operator in the middle": (
        tail, lambda x, w, s: torch.relu(x @ w * s), TAIL, "structure", "`mul` where the pattern has `add`", (1, 3)),
    "a difference for a sum": (
        tail, lambda x, w, s: torch.relu(x @ w - s), TAIL, "structure", "`sub` where the pattern has `add`", (2, 3)),
    "another operator at the end": (
        tail, lambda x, w, s: F.gelu(x @ w + s), TAIL, "structure", "`gelu` where the pattern has `relu`", (2, 3)),
    "nothing at the end": (
        tail, lambda x, w, s: x @ w + s, TAIL,
        "structure", "no `relu` follows here, as it does in the pattern", (2, 3)),
    "a number for a tensor": (
        tail, lambda x, w, s: torch.relu(x @ w + 2), TAIL,
        "structure", "`add` takes a number, where the pattern has a tensor", (2, 3)),
    "a factor of addmm": (
        tail, lambda x, w, s: torch.relu(torch.addmm(s, x, w, beta=2)), TAIL,
        "structure", "`addmm` has factors that the pattern does not have", (2, 3)),
    "another dimension": (
        joined, lambda x, y: torch.cat([x.exp(), y.exp()], 0), PAIR,
        "structure", "`cat` has dim 0, the pattern wants 1", (2, 3)),
    "another literal": (
        scaled, lambda x: torch.tanh(x * 3), (PAIR[0],), "structure", "the number is 3, the pattern wants 2", (0, 2)),
    "another permutation": (
        turned, lambda x, y: torch.tanh(torch.exp(x).permute(2, 1, 0) + y), SQUARE,
        "structure", "`permute` has dims [2, 1, 0], the pattern wants [0, 2, 1]", (1, 3)),
    "two values for one": (
        swish, lambda x, y: x * torch.sigmoid(y), PAIR,
        "structure", "`x` is one value in the pattern, and two here", (1, 2)),
    "a cast in between": (
        joined, lambda x, y: torch.cat([x.exp().double(), y.exp().double()], 1), PAIR,
        "structure", "the graph has `cast` to float64[3, 4] where the pattern has none", (2, 3)),
    "another number of pieces": (
        joined, lambda x, y: torch.cat([x.exp(), y.exp(), x.sin()], 1), PAIR,
        "structure", "`cat` has 3 operands, the pattern wants 2", (0, 3)),
    "a size": (
        wide, lambda x: x * torch.sigmoid(x), (PAIR[0],),
        "constraint", "dimension 1 of `x` is 4, the pattern wants 8", (2, 2)),
    "a dtype": (
        double, lambda x: x * torch.sigmoid(x), (PAIR[0],),
        "constraint", "`x` is float32, the pattern wants float64", (2, 2)),
    "the pattern's own check": (
        Judged, lambda x: x * torch.sigmoid(x), (PAIR[0],), "constraint", "only squares", (2, 2)),
    "a replacement of another shape": (
        Shrunk, lambda x: x * torch.sigmoid(x), (PAIR[0],),
        "constraint", "replace gives float32[1, 4], the pattern float32[3, 4]", (2, 2)),
    "a sum for a quotient": (
        scaled, lambda x, y: torch.tanh(x + y), PAIR, "structure", "`add` where the pattern has `mul`", (1, 2)),
    "another reader": (
        tail, read_again, TAIL, "used outside", "`mm` is used outside: `exp` reads it, too", (3, 3)),
    "a mutation between": (
        swish, written, (PAIR[0],), "alias or mutation", "`x` is written between its uses here", (1, 2)),
    "a path around": (
        two, around, (PAIR[0],), "not convex", "a path leads out of the pattern and back into it", (3, 3)),
    "no kernel": (
        tail, lambda x, w, s: torch.relu(x @ w + s), TAIL,
        "refused by lowering", "`mm` stays a library call, outside of loops: no kernel takes it in", (3, 3)),
}  # fmt: skip


def explained(pattern: Any, function: Callable[..., Any], *arguments: Tensor) -> Explanation:
    return explain(Function(function), arguments, None, define(pattern))


@pytest.mark.parametrize("case", CASES)
def test_the_true_reason_is_named(case):
    pattern, function, arguments, kind, reason, matched = CASES[case]
    explanation = explained(pattern, function, *arguments)
    best = explanation.best
    assert best is not None
    assert (best.kind, best.reason, (best.matched, best.total)) == (kind, reason, matched)
    assert f"nearest: {matched[0]} of {matched[1]} nodes; {reason}; test_explain.py:" in str(explanation)


def test_there_are_twenty_one():
    assert len(CASES) == 21


def test_a_pattern_of_higher_priority_is_named(registered):
    registered(priority=1)(swish)
    best = explained(lambda_named("gated", lambda x, y: torch.sigmoid(x) * y), swish, PAIR[0]).best
    assert (best.kind, best.reason) == ("overlapped", "a match of swish has taken some of its nodes")
    assert best.change == "a higher priority: @fuse.pattern(priority=1)"


def lambda_named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


def test_what_fires_needs_no_reason():
    explanation = explained(swish, swish, PAIR[0])
    assert (explanation.fired, explanation.best, explanation.missing) == (1, None, ())


class Wrong:
    def pattern(self, x):
        return torch.exp(x) * 2

    def replace(self, x):
        return torch.exp(x) * 3


def test_a_pattern_that_is_refused_says_so_first():
    explanation = explained(Wrong, lambda x: torch.exp(x) * 2, PAIR[0])
    assert explanation.fired == 1
    assert str(explanation.refusal).startswith("refused: result 0: error")
    assert explanation.to_dict()["refusal"] == explanation.refusal
    told = " ".join(str(explanation).split())
    assert "it is not used, and what follows is what would become of it in Function: 1 candidate: 1 fired" in told


def test_another_pattern_that_is_refused_takes_nothing(registered):
    registered(priority=1)(Wrong)
    assert explained(lambda_named("twice", lambda x: torch.exp(x) * 2), lambda x: torch.exp(x) * 2, PAIR[0]).fired == 1


def test_operators_that_the_graph_lacks_are_named():
    explanation = explained(tail, lambda x: torch.sin(x), PAIR[0])
    assert explanation.best is None
    assert explanation.missing == ("add", "mm", "relu")
    assert "no candidate\nthe graph has no `add` and no `mm` and no `relu`" in str(explanation)


def test_the_drawing_sets_the_pattern_beside_the_graph():
    best = explained(tail, lambda x, w, s: torch.relu(x @ w - s), *TAIL).best
    rows = [(row.wanted, row.found, row.note) for row in drawing(best)]
    assert ("relu", "relu", "") in rows
    assert ("└ add", "sub", "`sub` where the pattern has `add`") in rows
    assert any(wanted.endswith("mm") and found == "mm" for wanted, found, _ in rows)


FILE = """
    import torch
    import fuse

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.sigmoid(x + 1) * x

    def get_init_inputs():
        return []

    def get_inputs():
        return [torch.randn(4)]
"""
PATTERN = """
    import torch
    import fuse

    @fuse.pattern
    def swish(x):
        "x * sigmoid(x)"
        return x * torch.sigmoid(x)
"""


def test_the_command_takes_a_pattern_from_a_file(tmp_path, capsys):
    model, pattern = tmp_path / "model.py", tmp_path / "mine.py"
    model.write_text(textwrap.dedent(FILE))
    pattern.write_text(textwrap.dedent(PATTERN))
    assert cli.run(["explain", str(model), str(pattern), "--quiet"]) == verbs.GOOD
    printed = capsys.readouterr().out
    assert printed.startswith("swish (mine.py:")
    assert "nearest: 1 of 2 nodes; `x` is one value in the pattern, and two here; model.py:7" in printed
    assert "smallest change that would match: another parameter for the second" in printed
    assert cli.run(["explain", str(model), f"{pattern}:swish", "--json", "--quiet"]) == verbs.GOOD
    values = json.loads(capsys.readouterr().out)
    assert (values["candidates"], values["fired"], values["rejected"]) == (1, 0, {"structure": 1})
    assert (values["best"]["matched"], values["best"]["total"], values["best"]["source"]) == (1, 2, "model.py:7")


def test_an_unknown_pattern_is_one_line(tmp_path, capsys):
    model = tmp_path / "model.py"
    model.write_text(textwrap.dedent(FILE))
    assert cli.run(["explain", str(model), "swosh", "--quiet"]) == cli.ERROR
    assert "no pattern 'swosh'; 'fuse patterns' lists them" in capsys.readouterr().err
