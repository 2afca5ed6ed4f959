"""What a match is given and gives: the right nodes for its inputs, its results and what lies between."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import randn
from torch.fx.experimental.proxy_tensor import make_fx

import fuse
from fuse.rewrite.patterns import exact_match
from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.exact_match import FoundMatch, FoundResult, holders
from fuse.rewrite.patterns.forms import forms
from fuse.rewrite.patterns.index import GraphIndex
from fuse.rewrite.patterns.matching import match
from fuse.rewrite.patterns.search import Search


def only(found) -> FoundMatch:
    """The one match."""
    (outcome,) = found.matched
    match: FoundMatch = outcome.found
    return match


def names(nodes: Sequence) -> list[str]:
    return [node.name for node in nodes]


def test_members_do_something_and_views_and_parts_do_not(try_pattern):
    def sorted_rows(x):
        return torch.sort(torch.exp(x).t(), 0).values * 2

    found = only(try_pattern(sorted_rows, sorted_rows, randn(3, 4)))
    assert names(found.inside) == ["exp", "t", "sort", "getitem", "mul"]
    assert names(found.members) == ["exp", "sort", "mul"]


def test_members_are_not_what_is_made_from_nothing():
    def chosen(x, mask):
        return torch.where(mask, 2.0, torch.exp(x))

    graph = make_fx(lambda *given: (chosen(*given),), tracing_mode="fake")(randn(2), torch.tensor([True, False]))
    (outcome,) = match(graph, [define(chosen)], lambda found, around: found)
    assert names(outcome.found.inside) == ["exp", "scalar_tensor", "where"]
    assert names(outcome.found.members) == ["exp", "where"]


def test_a_match_ends_at_its_inputs(try_pattern):
    found = only(try_pattern(lambda x: torch.exp(x) * 2, lambda x: torch.exp(x.sin().t()) * 2, randn(3, 4)))
    assert names(found.inside) == ["exp", "mul"]
    assert names([given.node for given in found.inputs.values()]) == ["t"]


def test_a_result_is_a_node_of_its_shape_where_there_is_one(try_pattern):
    found = only(try_pattern(lambda x: torch.exp(x) * 2, lambda x: torch.exp(x) * 2, randn(3, 4)))
    assert found.outputs == (FoundResult(found.inside[-1], reshaped=False, is_input=False),)


def test_a_result_may_be_held_in_another_shape(try_pattern):
    def kept(x):
        return (torch.exp(x).sum(1, keepdim=True)) * 2

    found = only(try_pattern(kept, lambda x: torch.exp(x).sum(1) * 2, randn(3, 4)))
    assert found.outputs == (FoundResult(found.inside[-1], reshaped=True, is_input=False),)


def test_an_input_may_be_a_result(try_pattern):
    found = only(try_pattern(lambda x: (x, torch.exp(x) * 2), lambda x: torch.exp(x.sin()) * 2, randn(3)))
    assert [(output.node.name, output.is_input) for output in found.outputs] == [("sin", True), ("mul", False)]


class Flat:
    def pattern(self, x):
        return torch.sin(torch.exp(x.flatten(0, -2)))

    def examples(self):
        return [(randn(2, 3, 4),)]


def test_an_input_with_which_the_result_has_its_shape_is_preferred(try_pattern):
    found = only(try_pattern(Flat, lambda x: torch.sin(torch.exp(x.view(6, 4))), randn(3, 8)))
    assert names([given.node for given in found.inputs.values()]) == ["view"]
    assert not found.outputs[0].reshaped


def test_an_input_turned_back(try_pattern):
    def scores(x, w):
        return torch.softmax(x @ w.t(), -1)

    x, w = randn(3, 4), randn(4, 5)
    found = only(try_pattern(scores, lambda x, w: torch.softmax(x @ w, -1), x, w))
    assert [given.dims for given in found.inputs.values()] == [None, (1, 0)]
    found = only(try_pattern(scores, lambda x, w: torch.softmax(x @ w.t(), -1), x, w.t()))
    assert [given.dims for given in found.inputs.values()] == [None, None]


def test_inputs_may_be_several_views_away_each(try_pattern):
    class Columns:
        def pattern(self, x, y):
            return torch.exp(x.flatten(0, -2)) * y.unsqueeze(1)

        def examples(self):
            return [(randn(2, 3, 4), randn(6))]

    def model(x, y):
        return torch.exp(x.view(6, 4)) * y.unsqueeze(1)

    found = only(try_pattern(Columns, model, randn(3, 8), randn(6)))
    assert [given.node.name for given in found.inputs.values()] == ["view", "args_1"]


def test_a_list_takes_its_own_tensors(try_pattern):
    def joined(pieces=fuse.many(at_least=2), scale=fuse.tensor()):
        return torch.cat([torch.relu(piece) for piece in pieces], dim=1) * scale

    def model(x, y, scale):
        return torch.cat([x.relu(), y.relu()], 1) * scale

    found = only(try_pattern(joined, model, randn(2, 3), randn(2, 4), randn(2, 7)))
    assert {key: given.node.name for key, given in found.inputs.items()} == {
        ("pieces", 0): "args_0",
        ("pieces", 1): "args_1",
        ("scale", 0): "args_2",
    }


def test_a_result_with_many_readers_is_found_behind_them(try_pattern):
    def turned(x):
        return (torch.exp(x) * 2).t()

    def model(x):
        y = torch.exp(x) * 2
        return *(y + place for place in range(1, 30)), y.t().sin()

    found = only(try_pattern(turned, model, randn(3, 4)))
    assert names([output.node for output in found.outputs]) == ["t"]


@pytest.mark.parametrize(
    ("model", "most", "held"),
    [
        (lambda y: y.view(12).view(2, 6).view(6, 2).view(12), 3, 3),
        (lambda y: y.view(12).view(2, 6).view(6, 2).view(12), 4, 4),
        (lambda y: y.view(12).view(2, 6).view(6, 2).view(12), 9, 5),
        (lambda y: (y.view(12).view(2, 6), y.view(6, 2).view(2, 6), y.t().t(), y.view(1, 12)), 3, 4),
    ],
)
def test_views_are_looked_at_up_to_a_limit(monkeypatch, model, most, held):
    index = GraphIndex(make_fx(lambda x: model(torch.exp(x)), tracing_mode="fake")(randn(3, 4)))
    (form,), (step,) = forms(define(lambda x: torch.exp(x)), 1), index.steps("exp")
    (placement,) = Search(form, index).placements(form.steps[0], step)
    monkeypatch.setattr(exact_match, "MAX_VIEWS", most)
    assert len([*holders(form.roots[0], placement, {}, index)]) == held


def test_a_product_inside_of_another_operator_is_no_result(try_pattern):
    def product(x, w):
        return torch.exp(x) @ w

    found = try_pattern(product, lambda x, w, b: torch.addmm(b, torch.exp(x), w), randn(3, 4), randn(4, 5), randn(5))
    assert found.reason == "structure: a result of the pattern is inside of another operator"
    assert only(try_pattern(product, lambda x, w, b: F.linear(torch.exp(x), w.t()), randn(3, 4), randn(4, 5), randn(5)))
