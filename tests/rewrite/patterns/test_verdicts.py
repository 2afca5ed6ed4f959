"""Every candidate ends in one verdict, with its reason, and the totals add up."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

import fuse
from fuse.graph.capture import capture
from fuse.rewrite.patterns import search
from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.index import GraphIndex, Step
from fuse.rewrite.patterns.matching import match
from fuse.rewrite.pipeline import run_passes


def swish(x):
    return x * torch.sigmoid(x)


def tail(x, w, skip):
    return torch.relu(x @ w + skip)


TAIL = randn(3, 4), randn(4, 5), randn(3, 5)


def test_structure(try_pattern):
    found = try_pattern(tail, lambda x, w, s: torch.relu(x @ w - s), *TAIL)
    assert found.reason == "structure: `sub` where the pattern has `add`"
    (outcome,) = found.outcomes
    assert (outcome.matched, outcome.total, outcome.node.name, outcome.candidate.name) == (2, 3, "sub", "relu")
    assert outcome.change == "fuse.either(...) of `add` and `sub`"


@pytest.mark.parametrize("turned", [False, True])
def test_of_several_alternatives_the_one_that_came_furthest_is_told(try_pattern, turned):
    def wave(x):
        ways = [torch.tanh(torch.sin(torch.exp(x))), torch.tanh(torch.cos(torch.exp(x)))]
        return fuse.either(*(ways[::-1] if turned else ways))

    found = try_pattern(wave, lambda x: (torch.tanh(torch.cos(x.neg())), torch.sin(x.exp())), randn(4), near=True)
    (outcome,) = found.outcomes
    assert (outcome.matched, outcome.reason) == (2, "`neg` where the pattern has `exp`")
    found = try_pattern(wave, lambda x: (torch.tanh(x.neg()), torch.sin(x.exp()), torch.cos(x)), randn(4), near=True)
    (outcome,) = found.outcomes  # the first of two that came equally far
    assert (outcome.matched, outcome.reason) == (1, f"`neg` where the pattern has `{'cos' if turned else 'sin'}`")


def test_constraint(try_pattern):
    def wide(x=fuse.tensor(None, 8)):
        return x * torch.sigmoid(x)

    assert try_pattern(wide, lambda x: x * torch.sigmoid(x), randn(2, 4)).reason == (
        "constraint: dimension 1 of `x` is 4, the pattern wants 8"
    )


@pytest.mark.parametrize(
    ("model", "reader"),
    [
        (lambda x, w, s: (lambda h: (torch.relu(h + s), h.exp()))(x @ w), "`exp` reads it, too"),
        (lambda x, w, s: (lambda h: (torch.relu(h + s), h))(x @ w), "the model returns it"),
        (lambda x, w, s: (lambda h: (torch.relu(h + s), h.t()))(x @ w), "the model returns it"),
        (lambda x, w, s: torch.relu(s.copy_(x @ w) + x[:, :1]), "it is written to an input of the model"),
        (lambda x, w, s: torch.relu(s.copy_(x @ w) + x.mul_(2)[:, :1]), "it is written to an input of the model"),
    ],
)
def test_used_outside(try_pattern, model, reader):
    found = try_pattern(tail, model, *TAIL)
    assert found.reason == f"used outside: `mm` is used outside: {reader}"
    assert found.outcomes[0].node.name == "mm"


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (lambda x, w: torch.tanh(x).log1p() * w, "tanh"),
        (lambda x, w: torch.tanh(F.layer_norm(x, (4,), w)), "native_layer_norm[1]"),
    ],
)
def test_in_training_the_gradient_keeps_a_value_in_the_middle(registered, pattern, value):
    @registered
    class Kept:
        def pattern(self, x, w):
            return pattern(x, w)

        def replace(self, x, w):
            return pattern(x, w)

        def examples(self):
            return randn(3, 4), randn(4)

    class Model(nn.Module):
        def forward(self, x, w):
            return pattern(x, w)

    report = fuse.show(Model(), (randn(3, 4, requires_grad=True), randn(4, requires_grad=True)), train=True)
    assert [one.reason for one in report.rejected if one.pattern == "Kept"] == [
        f"used outside: `{value}` is used outside: the gradient is computed from it"
    ]


def test_alias_or_mutation(try_pattern):
    def between(x):
        gate = torch.sigmoid(x)
        x.add_(1)
        return x * gate

    found = try_pattern(swish, between, randn(4))
    assert found.reason == "alias or mutation: `x` is written between its uses here"

    def dropped(x):
        return torch.relu(F.dropout(x, 0.5, training=True)) * 2

    found = try_pattern(dropped, dropped, randn(4))
    assert found.reason == "alias or mutation: `bernoulli` draws random numbers, in an order that must stay"


def test_not_convex(try_pattern):
    def two(x, z):
        y = torch.exp(x)
        return y, torch.tanh(z) * y

    found = try_pattern(two, lambda x: (lambda y: (y.neg(), torch.tanh(y.sin()) * y))(torch.exp(x)), randn(3))
    assert found.reason == "not convex: a path leads out of the pattern and back into it"
    assert try_pattern(two, lambda x: (lambda y: (y.neg(), torch.tanh(x.sin()) * y))(torch.exp(x)), randn(3)).matched


def test_a_view_of_an_input_may_lead_back_to_the_pattern(try_pattern):
    def score(x, w):
        return torch.tanh(x @ w.t())

    found = try_pattern(score, lambda x, w: (lambda t: torch.tanh((x * t.sum()) @ t))(w.t()), randn(3, 4), randn(5, 4))
    assert found.matched


def pair(x, y, z):
    return torch.exp(x + z), torch.sin(y - z)


def test_of_matches_that_would_wait_for_each_other_one_fires(try_pattern):
    def circle(x, y, z1, z2):
        first_of_one, last_of_two = torch.exp(x + z1), torch.sin(y - z2)
        return torch.sin(last_of_two * 2 - z1), torch.exp(first_of_one * 2 + z2)

    arguments = randn(3), randn(3), randn(3), randn(3)
    found = try_pattern(pair, circle, *arguments)
    assert found.kinds == {"matched": 1, "not convex": 1}
    assert found.outcomes[1].reason == "it and another match would wait for each other's results"

    def line(x, y, z1, z2):
        one = torch.exp(x + z1), torch.sin(y - z1)
        return torch.sin(one[1] * 2 - z2), torch.exp(one[0] * 2 + z2)

    assert try_pattern(pair, line, *arguments).kinds == {"matched": 2}

    def circle_and_another(x, y, z1, z2):
        return *circle(x, y, z1, z2), torch.exp(x * 3 + z1), torch.sin(y * 3 - z1)

    assert try_pattern(pair, circle_and_another, *arguments).kinds["not convex"] == 1


def test_overlapped_by_another_pattern_and_priorities_decide(registered):
    registered(priority=0)(swish)

    @registered(priority=1)
    def gated(x, y):
        return torch.sigmoid(x) * y

    report = fuse.show(Gate(), (randn(4),), passes=["match_patterns"])
    assert [(one.pattern, one.count) for one in report.fired] == [("gated", 1)]
    assert [(one.pattern, one.reason) for one in report.rejected] == [
        ("swish", "overlapped: a match of gated has taken some of its nodes")
    ]


def test_refused_by_lowering(try_pattern):
    found = try_pattern(tail, lambda x, w, s: torch.relu(x @ w + s), *TAIL, lowering=True)
    assert found.reason == "refused by lowering: `mm` stays a library call, outside of loops: no kernel takes it in"
    assert found.outcomes[0].change == "leave `mm` out, or a method replace(self, ...)"


def test_refused_by_lowering_for_want_of_a_kernel(try_pattern):
    def ordered(x):
        return torch.sort(torch.exp(x)).values

    found = try_pattern(ordered, lambda x: torch.sort(torch.exp(x)).values, randn(3), lowering=True)
    assert found.reason == "refused by lowering: aten.sort.default has no kernel"
    assert found.outcomes[0].change == "a method replace(self, ...)"


def test_one_operator_is_no_fusion(try_pattern):
    def one(x):
        return torch.tanh(x)

    assert try_pattern(one, lambda x: torch.tanh(x), randn(3), lowering=True).reason == (
        "refused by lowering: it is one operator, and one launch already"
    )


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * x


class Swishes(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.sigmoid(x) * x, torch.sigmoid(y) * y


class Several(nn.Module):
    """Of five sigmoids: two in matches, one used outside, one of another value, one alone."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        gate = torch.sigmoid(y)
        return (
            torch.sigmoid(x) * x,
            x.exp() * torch.sigmoid(x.exp()),
            gate * y,
            gate,
            x * torch.sigmoid(x + y),
            x.tanh(),
        )


def test_totals_add_up_in_the_report_and_in_json(registered):
    registered(swish)
    report = fuse.show(Several(), (randn(4), randn(4)), passes=["common_subexpressions", "match_patterns"])
    (fired,) = [one for one in report.fired if one.pattern]
    rejected = {one.reason: one.count for one in report.rejected if one.pattern}
    assert (fired.pass_name, fired.pattern, fired.count, fired.launches_saved) == ("match_patterns", "swish", 2, 2)
    assert rejected == {
        "used outside: `sigmoid` is used outside: the model returns it": 1,
        "structure: `x` is one value in the pattern, and two here": 1,
    }
    assert fired.count + sum(rejected.values()) == 4  # sigmoids of the graph
    assert all(one.example and one.sources for one in report.rejected if one.pattern)
    values = json.loads(json.dumps(report.to_dict()))
    assert {"pass": "match_patterns", "pattern": "swish", "count": 2, "launches_saved": 2} in values["fired"]
    assert sum(one["count"] for one in values["rejected"] if one["pattern"] == "swish") == 2


def test_a_report_points_at_what_differs(registered):
    registered(tail)

    class Difference(nn.Module):
        def forward(self, x: Tensor, w: Tensor, skip: Tensor) -> Tensor:
            return torch.relu(x @ w - skip)

    report = fuse.show(Difference(), TAIL, passes=["match_patterns"])
    assert [(one.pattern, one.example) for one in report.rejected] == [("tail", "sub")]


def test_a_pattern_of_operators_that_the_graph_lacks_costs_nothing(try_pattern):
    assert try_pattern(tail, lambda x: torch.sin(x), randn(3)).outcomes == []


def test_a_candidate_inside_of_a_match_has_no_verdict_of_its_own(try_pattern):
    def thrice(x):
        return torch.sin(torch.sin(torch.sin(x)))

    found = try_pattern(thrice, lambda x: torch.sin(torch.sin(torch.sin(torch.sin(x)))), randn(3))
    assert found.kinds == {"matched": 1, "overlapped": 1}
    assert [one.change for one in found.outcomes] == ["", ""]  # of itself nothing goes first


def test_a_search_that_is_too_long_is_given_up(try_pattern, monkeypatch):
    monkeypatch.setattr(search, "MAX_TRIES", 2)  # the product, and the sigmoid
    assert try_pattern(swish, swish, randn(4)).matched
    monkeypatch.setattr(search, "MAX_TRIES", 1)
    assert try_pattern(swish, swish, randn(4)).reason == "structure: it may match here in more ways than are tried"


def test_fuel_stops_patterns_too(registered):
    registered(swish)
    for fuel in (0, 1, 2):
        graph = capture(Swishes(), (randn(4), randn(4)))
        assert len(run_passes(graph, passes=["match_patterns"], fuel=fuel).rewrites) == fuel
        assert len(graph.graph.find_nodes(op="call_module")) == fuel


def test_matching_leaves_the_graph_as_it_is():
    class Checked:
        def pattern(self, q, k):
            return torch.softmax(q @ k.transpose(-2, -1), -1)

        def check(self, m):
            assert m["k"].meta["val"].shape == (2, 3, 5, 8)
            return m.fail("no")

    class Scores(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return torch.softmax(q @ k.permute(0, 2, 3, 1), -1)

    graph = capture(Scores(), (randn(2, 3, 5, 8), randn(2, 5, 3, 8)))
    before = str(graph.graph)
    (outcome,) = match(graph, [define(Checked)], lambda found, around: found)
    assert (outcome.kind, outcome.reason) == ("constraint", "no")
    assert str(graph.graph) == before


def test_the_work_for_a_pattern_grows_with_its_candidates_only(monkeypatch):
    class Long(nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.length = length

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.length):
                x = torch.sin(x) * 2 + x.cos()
            return torch.sigmoid(x) * x

    touched: Counter[int] = Counter()
    real = GraphIndex.own

    def counting(self: GraphIndex, node: object) -> object:
        touched[id(self)] += 1
        return real(self, node)

    monkeypatch.setattr(GraphIndex, "own", counting)
    works = []
    for length in (10, 100, 1000):
        graph = capture(Long(length), (randn(3),))
        touched.clear()
        match(graph, [define(swish)], lambda found, around: found)
        works.append(sum(touched.values()))
    assert works[1] == works[2] < works[0]  # of few products it is asked which of them reads a sigmoid


def test_steps_are_indexed_by_what_they_compute():
    class Linear(nn.Module):
        def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return torch.addmm(b, x, w).t()

    graph = capture(Linear(), (randn(3, 4), randn(4, 5), randn(5)))
    index = GraphIndex(graph)
    addmm = next(iter(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)))
    (total,), (product,) = index.steps("add"), index.steps("matmul")
    assert total.node is product.node is addmm
    assert list(index.readers(product)) == [total]
    assert index.last_steps(addmm) == (Step(addmm, total.term),)
