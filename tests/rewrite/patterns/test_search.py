"""Where a form is outcomes for, what is tried, and that what is taken back is not known any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, randn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.forms import Form, forms
from fuse.rewrite.patterns.index import GraphIndex, Step
from fuse.rewrite.patterns.search import Search, alike, anchor, nearest_anchor
from fuse.rewrite.patterns.terms import TensorType, Terms

aten = torch.ops.aten


def form_of(pattern: Callable[..., Any]) -> Form:
    (form,) = forms(define(pattern), 1)
    return form


def index_of(model: Callable[..., Any], *arguments: Tensor) -> GraphIndex:
    return GraphIndex(make_fx(model, tracing_mode="fake")(*arguments))


def test_steps_are_alike_that_are_of_one_operator_with_equally_many_operands():
    terms, tensor_type = Terms(), TensorType((2,), torch.float32, None)
    x = terms.leaf("x", tensor_type)
    one, two, three = (terms.make("cat", [x] * count, tensor_type) for count in (1, 2, 3))
    assert alike(two, two)
    assert not any(alike(two, other) for other in (one, three, terms.make("stack", [x, x], tensor_type)))


def test_a_form_is_looked_for_where_the_fewest_operators_read_what_it_reads():
    def model(x):
        return torch.exp(x), torch.exp(x + x), torch.sin(x), torch.sin(x + x), torch.sin(torch.cos(x).exp().cos())

    form, index = form_of(lambda x: torch.sin(torch.cos(torch.exp(x)))), index_of(model, randn(3))
    term, steps = anchor(form, index)
    assert (term.name, [step.node.name for step in steps]) == ("cos", ["cos_1"])


def test_a_form_that_is_not_there_is_looked_for_by_the_rarest_operator_that_is():
    def model(x):
        return torch.exp(x), torch.exp(x + x), torch.cos(x)

    form, index = form_of(lambda x: torch.sin(torch.cos(torch.exp(x)))), index_of(model, randn(3))
    assert [*anchor(form, index)[1]] == []
    term, steps = nearest_anchor(form, index)
    assert (term.name, [step.node.name for step in steps]) == ("cos", ["cos"])


def test_a_number_is_no_tensor(try_pattern):
    def chosen(x, y, mask):
        return torch.where(mask, y, torch.exp(x))

    x, mask = randn(2), torch.tensor([True, False])
    assert try_pattern(chosen, chosen, x, x, mask).matched
    found = try_pattern(chosen, lambda x, mask: torch.exp(x).masked_fill(mask, 2.0), x, mask)
    assert found.reason == "structure: `masked_fill` takes a number, where the pattern has a tensor"


def test_a_tensor_of_equal_elements_may_be_read_as_a_number_and_as_a_tensor():
    def chosen(x, y, mask):
        return torch.where(mask, y, torch.exp(x))

    form = form_of(chosen)
    index = index_of(lambda x, mask: torch.where(mask, 2.0, torch.exp(x)), randn(2), torch.tensor([True, False]))
    placed = [len(list(Search(form, index).placements(form.steps[0], step))) for step in index.steps("where")]
    assert placed == [1, 0]
    filled = form_of(lambda x, mask: torch.exp(x).masked_fill(mask, 2.0))
    assert [len(list(Search(filled, index).placements(filled.steps[0], one))) for one in index.steps("where")] == [1, 1]


def test_what_is_taken_back_is_not_known_any_more():
    def several(x, z):
        return torch.cos(z), torch.exp(x), torch.sin(x), torch.atan2(x, z)

    graph = Graph()
    x, one, two = (_with_value(graph.placeholder(name)) for name in ("x", "one", "two"))

    def call(op: Any, *operands: Node) -> Node:
        return _with_value(graph.call_function(op, operands))

    start = call(aten.exp.default, x)
    first, second = call(aten.sin.default, x), call(aten.sin.default, x)
    without, with_cosine = call(aten.atan2.default, x, one), call(aten.atan2.default, x, two)
    graph.output((start, first, second, without, with_cosine, call(aten.cos.default, two)))
    form, index = form_of(several), GraphIndex(GraphModule({}, graph))
    exp, sin = (next(term for term in form.steps if term.name == name) for name in ("exp", "sin"))
    (step,) = index.steps("exp")
    placed = list(Search(form, index).placements(exp, step))
    assert [one.steps[sin].node for one in placed] == [first, second]
    assert all(one.inputs["z", 0] == (two,) for one in placed)


def _with_value(node: Node) -> Node:
    node.meta["val"] = torch.empty(3, device="meta")
    return node


def test_one_step_has_one_place():
    form = form_of(lambda x: torch.exp(torch.sin(x)) * torch.sin(x))
    index = index_of(lambda x: torch.exp(torch.sin(x)) * torch.cos(x), randn(3))
    (step,) = index.steps("exp")
    term = next(term for term in form.steps if term.name == "exp")
    assert isinstance(step, Step)
    assert list(Search(form, index).placements(term, step)) == []


def test_an_input_is_a_tensor_and_never_all_results_of_an_operator(try_pattern):
    def flat(weights):
        return torch.exp(weights.reshape(-1)) * 2

    def routing(logits):
        weights, chosen = torch.topk(logits, 2)
        return torch.exp(weights) * 2, chosen

    assert len(try_pattern(flat, routing, randn(8)).matched) == 1


@pytest.mark.parametrize(
    "model",
    [
        lambda x, y: (x - x) - x,
        lambda x, y: torch.sigmoid(y - x) * (y - x) - x,
        lambda x, y: (1 - x) - (y - x),
        lambda x, y: (torch.tanh(x) - (y - x)) - x,
    ],
)
def test_a_value_that_several_operators_compute_within_themselves_is_one(try_pattern, model):
    """Each ``- x`` negates ``x``: one value of the pattern, and as many of the graph."""
    assert len(try_pattern(model, model, randn(4), randn(4)).matched) == 1
