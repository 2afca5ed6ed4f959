"""Every pattern of the library is found in the structure that it is for, is right there, and stays out of others."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fuse.check.compare import compare
from fuse.check.judging import as_float64
from fuse.check.pattern import tensors_of, verify
from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.graph.outputs import outputs_of
from fuse.passes.match_patterns import match_patterns
from fuse.rewrite import nested
from fuse.rewrite.patterns import registry
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.matching import Outcome, match
from fuse.rewrite.pipeline import run_passes
from fuse.rewrite.registry import earlier_than
from tests.passes.patterns.published import PUBLISHED

MOST_LINES = 15
LONGER = ("CrossEntropy", "NearestUpsample")
"""They say at length where they were measured to be slower, and decline there."""

TRIED_IN_FULL = ("CrossEntropy", "NearestUpsample", "RepeatedEmbedding")
"""By tests of their own, with more calls than here."""

OWN = {one.name: one for one in registry.registered() if one.origin.startswith("fuse.passes.patterns.")}


def outcomes(pattern: Pattern, graph: GraphModule) -> list[Outcome]:
    return [one for body, _ in nested.walk(graph) for one in match(body, [pattern], lambda found, around: found)]


def captured(function: object, arguments: tuple[Tensor, ...]) -> GraphModule:
    with torch.no_grad():
        graph = capture(Function(function), arguments)  # type: ignore[arg-type]
    run_passes(graph, earlier_than(match_patterns.__name__))
    return graph


def test_there_are_sixty_and_each_has_a_structure():
    assert OWN.keys() == PUBLISHED.keys()
    assert len(OWN) >= 60


@pytest.mark.sampled
@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_found_in_its_structure_and_what_stands_in_its_place_is_right(name, capfd):
    pattern, published = OWN[name], PUBLISHED[name]
    model = Function(published.function)
    with torch.no_grad():
        after = capture(model, published.arguments)
        eager = after(*tensors_of(after, model, published.arguments))
        places = [one.index for one in after.meta["signature"].outputs]
        run_passes(after, earlier_than(match_patterns.__name__))
        found = outcomes(pattern, after)
        assert [one.kind for one in found].count("matched") == 1, [(one.kind, one.reason) for one in found]
        with registry.alone(pattern):
            run_passes(after, [match_patterns.__name__])
        mine = after(*tensors_of(after, model, published.arguments))
        exact = pytree.tree_leaves(published.function(*map(as_float64, published.arguments)))
    assert len(outputs_of(after.graph)) == len(mine) == len(eager)
    for place, reference in zip(places, exact, strict=True):
        wide = reference.reshape(mine[place].shape) if mine[place].is_floating_point() else None
        assert not compare("result", mine[place], eager[place], wide).problem
    assert capfd.readouterr().err == ""


REPLACED = [name for name in PUBLISHED if OWN[name].replace is not None]


def of_one_element(arguments: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
    """The arguments with one dimension of one of them cut to a single element, which is broadcast where it may be."""
    for place, argument in enumerate(arguments):
        for dim in range(argument.dim()):
            cut = argument.narrow(dim, 0, 1).clone()
            yield [cut if number == place else one for number, one in enumerate(arguments)]


@pytest.mark.sampled
@pytest.mark.parametrize("name", REPLACED)
def test_it_is_right_or_stays_where_an_argument_is_broadcast(name):
    published = PUBLISHED[name]
    model = Function(published.function)
    for given in of_one_element(published.arguments):
        try:
            published.function(*given)
        except (RuntimeError, IndexError, ValueError):  # the structure itself does not take it
            continue
        graph = captured(published.function, tuple(given))
        tensors = tensors_of(graph, model, given)
        with torch.no_grad(), registry.alone(OWN[name]):
            eager = graph(*tensors)
            run_passes(graph, [match_patterns.__name__])
            mine = graph(*tensors)
        for one, other in zip(mine, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_almost_it_stays(name):
    for near in PUBLISHED[name].near:
        found = outcomes(OWN[name], captured(near, PUBLISHED[name].arguments))
        assert [one.candidate for one in found if one.kind == "matched"] == []


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in REPLACED if name not in TRIED_IN_FULL])
def test_its_replacement_holds_wherever_it_is_used(name, capfd):
    found = verify(OWN[name], quick=True)
    assert found.passed, str(found)
    assert capfd.readouterr().err == ""


def test_focal_loss_is_on(fuses):
    published = PUBLISHED["FocalLoss"]
    fuses("FocalLoss", published.function, *published.arguments, launches=1)


def test_names_turn_on_what_is_off_for_as_long_as_asked():
    def on():
        return {one.name for one in registry.registered() if one.enabled}

    before = on()
    with registry.also(["GatedSilu"]):
        assert on() == before | {"GatedSilu"}
    with registry.also([registry.ALL]):
        assert on() >= OWN.keys()
    assert on() == before


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_short_and_says_where_it_is_from(name):
    pattern = OWN[name]
    parts = [one for one in (pattern.function, pattern.check, pattern.replace) if one is not None]
    lines = [line for one in parts for line in inspect.getsource(one).splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES or name in LONGER
    text = inspect.getdoc(getattr(inspect.getmodule(pattern.function), name)) or ""
    assert re.search(r"Source: \w[\w-]+/[\w.-]+,\s+[\w./-]+\.\w+\.$", text, re.MULTILINE)
