"""Patterns that are right by themselves, and not together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import fuse
from fuse.check.lint import lint
from fuse.check.pattern import verify
from fuse.check.reach import captured, fires, ways
from fuse.rewrite.patterns.definition import Pattern, define
from fuse.rewrite.pipeline import run_passes


def named(name: str, function: Any, replace: Any = None, check: Any = None, **settings: Any) -> Pattern:
    parts = {"pattern": staticmethod(function)}
    parts |= {} if replace is None else {"replace": staticmethod(replace)}
    parts |= {} if check is None else {"check": check}
    return define(type(name, (), parts), **settings)


WHOLE = named("Whole", lambda x: torch.tanh(torch.exp(x) * 2))
PART = named("Part", lambda x: torch.exp(x) * 2)


def found(*patterns: Pattern) -> list[tuple[str, str, str]]:
    return [(one.kind, one.pattern, one.other) for one in lint(patterns)]


def test_patterns_that_do_not_meet_are_fine():
    assert found(WHOLE, named("Other", lambda x: torch.sin(x) * x)) == []


def test_a_part_that_goes_first_shadows_the_whole():
    first = named("First", PART.function, priority=1)
    assert found(WHOLE, first) == [("shadowed", "Whole", "First")]


def test_the_order_of_registration_decides_at_equal_priority():
    assert found(PART, WHOLE) == [("order-dependent", "Whole", "Part")]
    assert found(WHOLE, PART) == []  # the whole goes first; the part is left to match alone


def test_a_declared_overlap_is_not_reported():
    first = named("First", PART.function, priority=1, overlaps=["Whole"])
    assert found(WHOLE, first) == []


def test_a_replacement_that_is_what_the_pattern_matches():
    again = named("Again", lambda x: torch.exp(x) * 2, lambda x: 2 * torch.exp(x))
    assert found(again) == [("looping", "Again", "Again")]


def test_two_patterns_that_turn_into_each_other():
    there = named("There", lambda x: torch.exp(x) * torch.exp(x), lambda x: torch.exp(x + x))
    back = named("Back", lambda x: torch.exp(x + x), lambda x: torch.exp(x) * torch.exp(x))
    assert ("looping", "There", "Back") in found(there, back)


def test_what_an_earlier_pass_rewrites_is_unreachable():
    assert found(named("Less", lambda x: torch.tanh(torch.exp(x) - 0.0))) == [("unreachable", "Less", "no_ops")]
    assert found(named("More", lambda x: torch.tanh(torch.exp(x) + 0.0))) == []  # -0.0 + 0.0 is 0.0: it stays


def test_what_can_never_match_is_unreachable_and_says_why():
    def never(self: Any, m: Any) -> Any:
        return m.fail("never")

    def small(self: Any, m: Any) -> Any:
        return m.fail("more than 8 rows") if m["x"].meta["val"].shape[0] > 8 else None

    one, two = (named("Judged", PART.function, check=judge) for judge in (never, small))
    (finding,) = lint([one])
    assert str(finding) == "unreachable: Judged; it does not match its own computation: constraint: never"
    assert found(two) == []


def test_an_operator_that_decomposes_is_no_obstacle():
    assert found(named("Silu", lambda x: F.silu(x) * 2)) == []


def test_a_pattern_is_reachable_by_one_way_of_several():
    either = named("Either", lambda x: fuse.either(torch.exp(x) - 0.0, torch.exp(x) * 2) + torch.sin(x))
    assert found(either) == []


def three_products(x: Any, u: Any, v: Any, w: Any) -> Any:
    return torch.exp(x @ u) * (x @ v) + x @ w


def test_products_that_are_merged_only_where_they_are_small_are_reachable_where_they_are_large():
    three = named("Three", three_products, lambda x, u, v, w: x @ w + (x @ v) / torch.exp(-(x @ u)))
    (small,) = ways(three)
    graph = captured(three, small)
    assert run_passes(graph, ["merge_sibling_gemms"]).rewrites
    assert not fires(graph, [three], three)
    assert found(three) == []


def either_way(x: Any) -> Any:
    return fuse.either(torch.tanh(torch.exp(x) * 2), torch.tanh(torch.sin(x) * 2))


def doubled(function: Any) -> Any:
    return lambda x: function(x) * 2


def test_ways_that_are_taken_one_by_one():
    exp, sin = (named(name, doubled(f), priority=1) for name, f in (("E", torch.exp), ("S", torch.sin)))
    either = named("Either", either_way)
    assert found(either, exp) == [("shadowed", "Either", "E")]
    shadowed = [("shadowed", "Either", "E"), ("shadowed", "Either", "S")]
    assert found(either, exp, sin) == [*shadowed, ("unreachable", "Either", "E, S")]


def weighted(x: Any, w: Any = fuse.tensor(constant=True)) -> Any:
    return torch.exp(x) * w


def test_weights_are_weights_when_a_pattern_is_tried():
    assert found(named("Weighted", weighted)) == []
    right = verify(named("Right", weighted, lambda x, w: w * torch.exp(x)))
    assert right.passed, str(right)
    assert right.missed > 0
    wrong = verify(named("Wrong", weighted, lambda x, w: torch.exp(x) * (w + 1e-3)))
    assert "result 0: error" in str(wrong.counterexample)
