"""Pairs of functions as torch.fx and Inductor take them are patterns, unchanged."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

import fuse
from fuse.errors import FuseError
from fuse.graph.function import Function
from fuse.rewrite.patterns.pattern_cache import source_of


def fired(function, *arguments):
    report = fuse.show(Function(function), arguments)
    return [(one.pattern, one.count) for one in report.fired if one.pattern]


def test_a_pair_of_torch_fx(registered):
    """The example of the documentation of ``torch.fx.subgraph_rewriter.replace_pattern``, with tensors for its sums."""

    def pattern(w1, w2):
        return torch.cat([w1, w2]).sum()

    def replacement(w1, w2):
        return w1.sum() + w2.sum()

    fuse.pattern(pattern, replacement, name="SumOfCat")

    def model(x, w1, w2):
        val1 = torch.cat([w1, w2]).sum()
        val2 = torch.cat([w1, w2]).sum()
        return x + torch.max(val1) + torch.max(val2)

    assert fired(model, randn(4), randn(3, 4), randn(5, 4)) == [("SumOfCat", 1)]  # the second is the first


def test_pairs_of_inductor(registered):
    from torch._inductor.fx_passes import fuse_attention as sdpa

    def given():
        return [randn(2, 4, 8, 16) for _ in range(3)]

    scaled = {"examples": lambda: (*given(), 2.0), "finite": True}
    first = fuse.pattern(sdpa._sfdp_pattern_1, sdpa._sfdp_replacement_1, name="Divided", **scaled)
    second = fuse.pattern(sdpa._sfdp_pattern_2, sdpa._sfdp_replacement_2, name="Multiplied", enabled=False, **scaled)
    assert (
        [one.name for one in first.parameters] == [one.name for one in second.parameters] == ["query", "key", "value"]
    )
    q, k, v = given()
    ours = [("Divided", 1)]
    assert fired(lambda q, k, v: (torch.matmul(q, k.transpose(-2, -1)) / 4).softmax(-1) @ v, q, k, v) == ours
    assert fired(lambda q, k, v: F.softmax(q @ k.mT * 0.25, dim=-1) @ v, q, k, v) == ours
    compiled = fuse.compile(Function(lambda q, k, v: F.softmax(q @ k.mT * 0.25, dim=-1) @ v))
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, v), F.softmax(q @ k.mT * 0.25, dim=-1) @ v)


def test_a_default_that_is_a_number_is_a_constant(registered):
    def search(x, slope=0.1):
        return torch.where(x > 0, x, x * slope)

    def replace(x, slope):
        return F.leaky_relu(x, slope)

    fuse.pattern(search, replace)
    assert fired(lambda x: torch.where(x > 0, x, x * 0.3), randn(4, 8)) == [("search", 1)]


def test_check_and_modules(registered):
    class Search(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))

    wide = fuse.pattern(
        Search(),
        lambda x: F.gelu(x),
        name="Gelu",
        finite=True,
        check=lambda m: m.fail("narrow") if m["x"].meta["val"].shape[-1] < 8 else None,
    )
    assert wide.name == "Gelu"
    gelu = Search()
    assert fired(gelu.forward, randn(4, 8)) == [("Gelu", 1)]
    assert fired(gelu.forward, randn(4, 4)) == []


def test_what_does_not_fit_is_an_error(registered):
    with pytest.raises(FuseError, match="search has 1 parameters, and replace 2"):
        fuse.pattern(lambda x: x.exp(), lambda x, y: x.exp(), name="one")
    with pytest.raises(FuseError, match="takes 1 arguments, and an example has 2"):
        fuse.pattern(lambda x: x.exp(), lambda x: x.exp(), name="one", examples=(randn(2), randn(2)))


def test_a_pair_is_known_again_by_its_code(registered):
    def made(factor):
        return fuse.pattern(lambda x: x.exp() * factor, lambda x: factor * x.exp(), name="pair", examples=(randn(2),))

    assert source_of(made(2.0)) == source_of(made(2.0))
    assert source_of(made(2.0)) != source_of(made(3.0))
