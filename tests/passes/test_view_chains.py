from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

PASSES = ["view_chains"]


class Chain(nn.Module):
    """Views of the input, then one operator that reads them."""

    def __init__(self, views: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.views = views

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.views(x))


class Permuted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x.permute(1, 2, 0).permute(1, 0, 2))


IN_ONE = {
    "view of view": lambda x: x.view(6, 4).view(2, 12),
    "slice of slice": lambda x: x[1:][1:],
    "permutation of permutation": lambda x: x.permute(1, 0).permute(1, 0)[1:],
    "expansion of expansion": lambda x: x.expand(3, 4, 6).expand(3, 4, 6),
    "select of slice": lambda x: x[2:][0],
    "select of transposition": lambda x: x.t()[2],
}
IN_NONE = {
    "transposed twice": lambda x: x.t().t(),
    "the whole slice": lambda x: x[:, :],
    "detached": lambda x: x.detach(),
    "unsqueezed and squeezed": lambda x: x.unsqueeze(1).squeeze(1),
    "viewed and viewed back": lambda x: x.view(-1).view(4, 6),
    "expanded to its own size": lambda x: x.expand(4, 6),
}
TWO = {
    "a view across a slice": lambda x: x[:, 1:3].unsqueeze(0),
    "a slice of a flat view": lambda x: x.view(-1)[1:7],
    "rows and columns": lambda x: x[1:, 1:],
}


@pytest.mark.parametrize("views", IN_ONE.values(), ids=IN_ONE)
def test_two_views_become_one(rewritten, views):
    result = rewritten(Chain(views), torch.randn(4, 6), passes=PASSES)
    assert [str(node.op) for node in result.graph.graph.nodes].count("call_function") == 2, "one view, and exp"


@pytest.mark.parametrize("views", IN_NONE.values(), ids=IN_NONE)
def test_views_that_change_nothing_vanish(rewritten, views):
    result = rewritten(Chain(views), torch.randn(4, 6), passes=PASSES)
    assert [str(node.target) for node in result.graph.graph.nodes if node.op == "call_function"] == ["aten.exp.default"]


@pytest.mark.parametrize("views", TWO.values(), ids=TWO)
def test_what_takes_two_views_stays_and_says_so(rewritten, views):
    result = rewritten(Chain(views), torch.randn(4, 6), passes=PASSES)
    assert result.fired == {}
    assert result.reasons == {"no single view gives the same layout": 1}


def test_two_permutations_become_one(rewritten):
    result = rewritten(Permuted(), torch.randn(2, 3, 4), passes=PASSES)
    (permutation,) = [node for node in result.graph.graph.nodes if "permute" in str(node.target)]
    assert permutation.args[1] == [2, 1, 0]


def test_conjugated_views_are_told_apart(rewritten):
    model = Chain(lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().t().abs())
    assert rewritten(model, torch.randn(4, 6), passes=PASSES).results[0].shape == (3, 4)
