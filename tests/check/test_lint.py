"""Patterns that are right by themselves, and not together."""

from __future__ import annotations

from typing import Any

import torch

from fuse.check.lint import lint
from fuse.rewrite.patterns.definition import Pattern, define


def named(name: str, function: Any, replace: Any = None, **settings: Any) -> Pattern:
    parts = {"pattern": staticmethod(function)} | ({} if replace is None else {"replace": staticmethod(replace)})
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
