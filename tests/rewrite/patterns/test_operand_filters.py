"""What steps read tells where a form cannot lie, before anything is placed or traced."""

from __future__ import annotations

import pytest
import torch
from torch import randn

import fuse
from fuse.graph.function import Function
from fuse.rewrite.patterns import forms, matching
from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.operand_filters import OperandFilter, fits


def gated(x, y):
    return torch.tanh(torch.sigmoid(x) * y)


@pytest.mark.parametrize(
    ("read", "answer"),
    [
        ([("mul",), ("number",)], True),
        ([("number",), ("add", "mul")], True),
        ([("mul",), ("mul",)], False),
        ([("mul",)], False),
        ([("mul", "number"), ()], True),  # one operand stands for both: it asks for less than the search does
    ],
)
def test_a_fan_asks_for_names_among_operands(read, answer):
    assert fits(OperandFilter("add", 2, ("mul", "number")), read) is answer


def test_a_fan_asks_for_each_as_often_as_the_form_reads_it():
    assert not fits(OperandFilter("add", 2, ("mul", "mul")), [("mul",), ("sin",)])


def test_where_no_operator_reads_what_the_forms_does_nothing_is_traced(try_pattern, monkeypatch):
    def other(x, y):
        return torch.tanh(torch.sigmoid(x)) * y

    forms.known_runs(define(gated), 1)  # what is kept of it
    monkeypatch.setattr(matching, "all_forms", lambda *given: pytest.fail("its forms are asked for"))
    found = try_pattern(gated, other, randn(3), randn(3))
    assert found.reason == "structure: no `tanh` here reads `mul`"
    assert found.outcomes[0].node.name == "tanh"


def test_explaining_says_more(try_pattern):
    found = try_pattern(gated, lambda x, y: torch.tanh(torch.sigmoid(x)) * y, randn(3), randn(3), near=True)
    assert "structure: `sigmoid` where the pattern has `mul`" in {f"{o.kind}: {o.reason}" for o in found.outcomes}


def test_candidates_are_those_that_read_what_the_form_reads(try_pattern):
    def many(x, y):
        for _ in range(70):
            x = torch.tanh(x + y) * torch.sigmoid(x.exp())
        return torch.tanh(torch.sigmoid(x) * y)

    found = try_pattern(gated, many, randn(3), randn(3))
    assert found.kinds == {"matched": 1}


def test_a_candidate_that_another_match_has_taken_is_not_placed(registered):
    @registered(priority=1)
    def whole(x, y):
        return torch.tanh(torch.sigmoid(x) * y)

    @registered
    def inner(x, y):
        return torch.sigmoid(x) * y

    report = fuse.show(Function(gated), (randn(3), randn(3)), passes=["match_patterns"])
    assert [one.pattern for one in report.fired] == ["whole"]
    assert [one.reason for one in report.rejected] == ["overlapped: a match of whole has taken some of its nodes"]
