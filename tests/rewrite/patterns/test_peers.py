"""The cases of PyTorch's own tests of its matchers: what fuse makes of each is what the table of the documents says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.metamorphic import tensors_of, values_of
from benchmarks.respelled import holds
from fuse.check.judging import quiet
from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.passes.match_patterns import prepare
from fuse.rewrite.patterns import registry
from fuse.rewrite.patterns.matching import match
from fuse.rewrite.pipeline import run_passes
from tests.rewrite.patterns.conftest import CLEANED
from tests.rewrite.patterns.peer_cases import CASES, DECLINED, PAGE, REFUSED, Case, page, show


def named(one: Case) -> str:
    return one.name


@pytest.mark.parametrize("case", [one for one in CASES if one.pattern], ids=named)
def test_a_pattern_matches_as_often_as_the_table_says(case):
    pattern = case.pattern()
    with torch.no_grad(), quiet():
        graph = capture(Function(case.model), case.arguments)
    run_passes(graph, CLEANED)
    values = values_of(graph, tensors_of(graph, [one.clone() for one in case.arguments]))
    found = [one.found for one in match(graph, [pattern], lambda found, around: found) if one.kind == "matched"]
    assert len(found) == case.matches
    assert case.here == DECLINED or all(holds(one, values) for one in found)
    if pattern.replace is not None:
        assert (registry.refusal(pattern) is not None) == (case.here == REFUSED)
        used = sum(one.kind == "matched" for one in match(graph, [pattern], prepare))
        assert used == (0 if case.here in (DECLINED, REFUSED) else case.matches)


@pytest.mark.parametrize("case", [one for one in CASES if one.launches], ids=named)
def test_without_a_pattern_so_many_launches_are_left(case):
    report = show(case)
    assert (report.before.launches, report.after.launches) == case.launches


def test_the_page_has_every_case():
    assert PAGE.read_text() == page()
