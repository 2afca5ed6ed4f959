"""Matches that get into each other's way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import randn

from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.rewrite.patterns import matching
from fuse.rewrite.patterns.conditions import Misfit
from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.matching import Outcome, match


def pair(x, y, z):
    return torch.exp(x + z), torch.sin(y - z)


def chain(x):
    return torch.tanh(torch.cos(x))


def matched(patterns: Sequence[Any], model: Callable[..., Any], prepare: Any, inputs: int = 4) -> list[Outcome]:
    graph = capture(Function(model), tuple(randn(3) for _ in range(inputs)))
    return match(graph, [define(pattern) for pattern in patterns], prepare)


def circle(x, y, z1, z2):
    first_of_one, last_of_two = torch.exp(x + z1), torch.sin(y - z2)
    return torch.sin(chain(last_of_two) - z1), torch.exp(first_of_one * 2 + z2)


def test_a_match_with_one_result_between_two_that_wait_for_each_other_is_kept():
    found = matched([pair, chain], circle, lambda found, around: found)
    assert [(one.pattern.name, one.kind) for one in found] == [
        ("pair", "matched"),
        ("pair", "not convex"),
        ("chain", "matched"),
    ]


def test_what_is_declined_waits_for_nothing():
    def first_alone(found, around):
        is_first = any(given.node.name == "args_0" for given in found.inputs.values())
        return found if is_first else Misfit("refused by lowering", "it is not the first")

    found = matched([pair], circle, first_alone)
    assert [one.kind for one in found] == ["matched", "refused by lowering"]


def test_who_took_a_node_first_is_told_and_how_to_be_the_first():
    def gated(x, y):
        return torch.sigmoid(x) * y

    def swish(x):
        return torch.sigmoid(x) * x

    found = matched([gated, swish], lambda x: torch.sigmoid(x) * x, lambda found, around: found, 1)
    assert [(one.kind, one.change) for one in found] == [
        ("matched", ""),
        ("overlapped", "a higher priority: @fuse.pattern(priority=1)"),
    ]


def test_what_the_model_computes_twice_is_one_value_in_a_pattern():
    def shared(x, y):
        scaled = x * 2.5
        return scaled.exp() + scaled.sin() * y

    def twice(x, y):
        return (2.5 * x).exp() + (x / 0.4).sin() * y

    def two(x, y):
        return (2.5 * x).exp() + (x * 2.6).sin() * y

    found = matched([shared], twice, prepare=lambda found, around: found, inputs=2)
    assert [one.kind for one in found] == ["matched"]
    assert len(found[0].found.members) == 6
    found = matched([shared], two, prepare=lambda found, around: found, inputs=2)
    assert "matched" not in [one.kind for one in found]


def test_a_difference_that_two_operators_take_of_their_own_is_one_value():
    def shared(x, y, z):
        middle = torch.log(z)
        return x.exp() * (x - middle) + y.exp() * (y - middle)

    found = matched([shared], shared, prepare=lambda found, around: found, inputs=3)
    assert [one.kind for one in found] == ["matched"]


def test_of_many_that_look_alike_one_is_explained(monkeypatch):
    def pressed(x):
        return torch.sigmoid(torch.tanh(torch.exp(x)))

    def loop(x):
        for _ in range(100):
            x = torch.sigmoid(torch.tanh(torch.sin(x))) + torch.cos(torch.tanh(torch.exp(x)))
        return x

    asked = []
    explained = matching.partial_match_at
    monkeypatch.setattr(matching, "partial_match_at", lambda *given: asked.append(given) or explained(*given))
    found = matched([pressed], loop, prepare=None, inputs=1)
    assert len(found) == 100
    assert {one.reason for one in found} == {"`sin` where the pattern has `exp`"}
    assert len(asked) < 30
    assert all(one.node is not None for one in found)
