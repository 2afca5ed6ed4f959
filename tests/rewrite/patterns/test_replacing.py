"""What a replacement gives stands for the pattern's results: in their shape and layout, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import randn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import fuse
from fuse.rewrite import regions
from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.matching import Outcome, match
from fuse.rewrite.patterns.replacing import put, replacement


def outcome_of(pattern: Callable[..., Any], replace: Callable[..., Any], graph: GraphModule) -> Outcome:
    """What becomes of the one candidate in ``graph``."""
    described = type("Replaced", (), {"pattern": staticmethod(pattern), "replace": staticmethod(replace)})
    (outcome,) = match(graph, [define(described)], replacement)
    return outcome


def replaced(pattern: Any, replace: Any, model: Any, *given: Any) -> list[str]:
    """The operators of a model whose match was replaced, which gives the same values with the same strides."""
    graph = make_fx(model, tracing_mode="fake")(*given)
    outcome = outcome_of(pattern, replace, graph)
    assert outcome.kind == "matched", outcome.reason
    put(outcome.prepared, {})
    regions.sort(graph.graph)
    graph.recompile()
    for found, wanted in zip(graph(*given), model(*given), strict=True):
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()
    return [str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function"]


def kept(x):
    return torch.exp(x).sum(1, keepdim=True) * 2


def test_a_replacement_in_the_patterns_shape_is_put_in_that_of_the_graph():
    operators = replaced(
        kept, lambda x: (x.exp() * 2).sum(1, keepdim=True), lambda x: (x.exp().sum(1) * 2,), randn(3, 4)
    )
    assert operators == ["exp", "mul", "sum", "view"]


def split(x):
    return torch.sin(torch.exp(x)).unflatten(1, (-1, 4))


@pytest.mark.parametrize(
    ("replace", "operators"),
    [
        (lambda x: torch.exp(x).sin().unflatten(1, (-1, 4)), ["exp", "sin", "view", "view"]),
        (
            lambda x: torch.exp(x.unflatten(1, (-1, 4)).transpose(1, 2).contiguous()).sin().transpose(1, 2),
            ["view", "transpose", "clone", "exp", "sin", "transpose", "clone", "view"],
        ),
    ],
)
def test_what_is_no_view_in_the_graphs_shape_is_copied_first(replace, operators):
    assert replaced(split, replace, lambda x: (torch.sin(torch.exp(x)),), randn(2, 12)) == operators


def product(x, w):
    return torch.tanh(x @ w)


def test_a_replacement_in_another_layout_is_copied():
    operators = replaced(
        product,
        lambda x, w: torch.tanh((w.t() @ x.t()).t()),
        lambda x, w: (torch.tanh(x @ w),),
        randn(3, 4),
        randn(4, 5),
    )
    assert operators == ["t", "t", "mm", "t", "tanh", "clone"]


def test_an_input_that_is_a_result_stays_whatever_the_replacement_gives_for_it():
    def both(x):
        return x, torch.exp(x) * 2

    operators = replaced(
        both,
        lambda x: (x.double().t().contiguous(), x.exp() + x.exp()),
        lambda x: (torch.exp(x) * 2, x + 1),
        randn(3, 4),
    )
    assert operators[-3:] == ["exp", "add", "add"]
    assert "mul" not in operators


def test_one_node_may_hold_two_results():
    def twice(x):
        y = torch.exp(x) * 2
        return y, y

    operators = replaced(
        twice, lambda x: (x.exp() + x.exp(), x.exp() + x.exp()), lambda x: (torch.exp(x) * 2 + 1,), randn(3)
    )
    assert operators.count("add") == 3


def test_an_input_that_the_replacement_does_not_read():
    operators = replaced(
        lambda x, y: torch.exp(x * 0.5) + (y - y),
        lambda x, y: torch.exp(x / 2),
        lambda x, y: (torch.exp(x * 0.5) + (y - y),),
        randn(3),
        randn(3),
    )
    assert operators == ["div", "exp"]


def test_an_input_that_only_another_way_reads():
    def scaled(x, y):
        return torch.sin(fuse.either(lambda: torch.exp(x), lambda: torch.exp(x) * y, name="way"))

    def turned(x, y):
        return torch.cos(math.pi / 2 - fuse.either(lambda: x.exp(), lambda: x.exp() * y, name="way"))

    assert replaced(scaled, turned, lambda x: (torch.sin(torch.exp(x)),), randn(3)) == ["exp", "rsub", "cos"]


def pair(x):
    y = torch.exp(x)
    return y, y * 2


@pytest.mark.parametrize(
    ("pattern", "replace", "model", "reason"),
    [
        (pair, lambda x: x.exp(), pair, "replace gives 1 results, the pattern 2"),
        (kept, lambda x: x.exp().sum(1), lambda x: (x.exp().sum(1) * 2,), None),
        (
            kept,
            lambda x: x.exp(),
            lambda x: (x.exp().sum(1) * 2,),
            "replace gives float32[3, 3], the pattern float32[3]",
        ),
        (
            kept,
            lambda x: x.exp()[0, 0],
            lambda x: (x.exp().sum(1) * 2,),
            "replace gives float32[], the pattern float32[3]",
        ),
        (
            lambda x: torch.exp(x.t()) * 2,
            lambda x: torch.exp(x.t().contiguous()) + 1,
            lambda x: (torch.exp(x.t()) * 2,),
            "replace gives strides that no copy has",
        ),
        (
            lambda x: torch.exp(x) * 2,
            lambda x: x.exp().view(9),
            lambda x: (torch.exp(x) * 2,),
            "replace gives float32[9], the pattern float32[3, 3]",
        ),
        (pair, lambda x: (x.exp(),) * 2, pair, "the caller would see a result in another tensor's memory"),
        (pair, lambda x: (x.exp(),) * 2, lambda x: tuple(y + 1 for y in pair(x)), None),
    ],
)
def test_what_does_not_fit_is_declined(pattern, replace, model, reason):
    graph = make_fx(model, tracing_mode="fake")(randn(3, 3))
    outcome = outcome_of(pattern, replace, graph)
    assert (outcome.reason or None) == reason
