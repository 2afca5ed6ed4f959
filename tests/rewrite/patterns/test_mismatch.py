"""What is told of a pattern that lies in a graph but for something: only what differs, and what is there."""

from __future__ import annotations

import torch
from torch import randn

import fuse


def test_a_constant_that_the_graph_cannot_hold(try_pattern):
    found = try_pattern(lambda x: torch.exp(x / fuse.const("c")), lambda x: torch.exp(x * 0), randn(3))
    assert found.reason == "structure: the graph has no value for a constant of the pattern"


def test_results_that_are_there_are_not_told(try_pattern):
    def two(x, z):
        y = torch.exp(x)
        return y.t(), torch.tanh(z) * 2 + y

    def model(x, z):
        y = torch.exp(x)
        return y.t().sin(), (torch.tanh(z) * 3 + y).sin()

    (outcome,) = try_pattern(two, model, randn(3, 4), randn(3, 4)).outcomes
    assert [one.reason for one in outcome.differences] == ["the number is 3, the pattern wants 2"]
    assert (outcome.matched, outcome.total) == (2, 4)


def test_what_is_drawn_lies_in_the_graph(try_pattern):
    def scaled(x, y):
        return torch.tanh(torch.exp(x) * 2 + torch.sin(y))

    def model(x, y):
        return torch.tanh(torch.exp(x) * 3 + torch.sin(y))

    (outcome,) = try_pattern(scaled, model, randn(3), randn(3)).outcomes
    assert {ours.name: theirs.name for ours, theirs in outcome.drawing.nodes.items()} == {"exp": "exp", "sin": "sin"}
    assert {theirs.graph for theirs in outcome.drawing.nodes.values()} == {outcome.candidate.graph}
    assert [node.name for node in outcome.drawing.inputs.values()] == ["args_0", "args_1"]


def test_another_part_of_an_operator_with_several_results(try_pattern):
    def largest(x):
        return torch.exp(x).max(0).values

    found = try_pattern(largest, lambda x: torch.exp(x).max(0).indices + 1, randn(3, 4))
    assert found.reason == "structure: `part` has index 1, the pattern wants 0"
