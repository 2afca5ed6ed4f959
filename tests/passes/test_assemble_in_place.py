from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fuse.graph.capture import capture
from fuse.kernel.kernel import Declined
from fuse.loops.collectors import COLLECTORS
from fuse.passes import assemble_in_place
from fuse.rewrite import regions
from fuse.rewrite.ledger import Ledger
from fuse.rewrite.pipeline import run_passes
from fuse.testing import assert_fuses

PASSES = ["fuse_pointwise", "fuse_reductions", "assemble_in_place"]
X = torch.arange(16.0).view(4, 4) / 9


def rewritten(model: nn.Module) -> tuple[GraphModule, Ledger]:
    graph = capture(model, (X,))
    return graph, run_passes(graph, PASSES)


class Loop(nn.Module):
    """Two kernels with a product between them, collected by ``collect``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.5 + 0.1)

    def steps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = (x * 2).tanh()
        second = (first @ self.weight + 1).sigmoid() * 2
        return first, second

    def forward(self, x: Tensor) -> object:
        return self.collect(*self.steps(x))

    def collect(self, first: Tensor, second: Tensor) -> object:
        return torch.stack([first, second], 1)


class NegativeDimension(Loop):
    def collect(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first, second], -1)


class PieceAlsoReturned(Loop):
    def collect(self, first: Tensor, second: Tensor) -> object:
        return torch.cat([first, second]), second


class PieceTwice(Loop):
    def collect(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([second, first, second], 1)


class ThroughViews(Loop):
    def collect(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first.t()[1:], second.chunk(2)[1]])


class InTwoCollections(Loop):
    def collect(self, first: Tensor, second: Tensor) -> object:
        return torch.cat([first, second]), torch.stack([second, first], -1)


class ReadAndChanged(Loop):
    def collect(self, first: Tensor, second: Tensor) -> Tensor:
        both = torch.cat([first, second])
        return both[1:].exp() + both[:-1]


ASSEMBLED = [Loop, NegativeDimension, PieceAlsoReturned, PieceTwice, ThroughViews, InTwoCollections, ReadAndChanged]


@pytest.mark.parametrize("model", ASSEMBLED)
def test_kernels_write_into_the_collected_tensor(model):
    graph, ledger = rewritten(model())
    assert [fired.pass_name for fired in ledger.fired][-1] == "assemble_in_place"
    assert not [n for n in graph.graph.nodes if n.target in COLLECTORS]


@pytest.mark.parametrize("model", ASSEMBLED)
def test_collected_tensors_are_right_when_run(model):
    assert_fuses(model(), X)


def test_the_collection_is_no_launch():
    assert_fuses(Loop(), X, launches=2, fired={"assemble_in_place": 1})


class FromOutside(Loop):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.steps(x)
        return torch.cat([x, first, second])


class FromAProduct(Loop):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([(x * 2).tanh(), x @ self.weight])


class MixedDtype(Loop):
    def collect(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first, second.double()])


class NestedCollection(Loop):
    def collect(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([torch.cat([first, second]), first])


class OneKernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        shared = x.tanh()
        return torch.cat([shared * 2, shared + 1])


DECLINED = {
    FromOutside: "a piece comes from outside, which no generated kernel computes",
    FromAProduct: "a piece comes from aten.mm.default, which no generated kernel computes",
    NestedCollection: "a piece comes from fuse.assemble.default, which no generated kernel computes",
    OneKernel: "one kernel computes all pieces",
}


@pytest.mark.parametrize(("model", "reason"), DECLINED.items())
def test_other_pieces_stay_and_say_why(model, reason):
    assert reason in [rejected.reason for rejected in rewritten(model())[1].rejected]


@pytest.mark.parametrize("model", [*DECLINED, MixedDtype])
def test_declined_collections_are_right_when_run(model):
    assert_fuses(model(), X)


class WrittenBack(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.zeros(8, 4))

    def collect(self, first: Tensor, second: Tensor) -> Tensor:
        self.held.copy_(torch.cat([first, second]))
        return self.held.sum()


def test_a_collection_that_is_written_back_to_an_input_is_right():
    assert_fuses(WrittenBack(), X, fired={"assemble_in_place": 1})


def test_a_region_that_cannot_be_extended_is_left_alone(monkeypatch):
    monkeypatch.setattr(assemble_in_place, "lower", lambda body: Declined("too strange"))
    graph, ledger = rewritten(Loop())
    assert [rejected.reason for rejected in ledger.rejected] == ["too strange"]
    assert [len(n.users) for n in graph.graph.nodes if regions.is_region(n)] == [1, 1]
