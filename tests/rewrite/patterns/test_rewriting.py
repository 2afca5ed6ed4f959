"""What a match becomes: one region and one kernel, or what the pattern's own replacement says; eager's results either
way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn
from torch.fx import Graph, GraphModule

import fuse
from fuse.graph.capture import capture
from fuse.graph.function import Function
from fuse.graph.loop import Loop, LoopSpec
from fuse.kernel.domain import Domain
from fuse.passes.match_patterns import domain
from fuse.report.explain import explain
from fuse.rewrite import surgery
from fuse.rewrite.patterns import registry
from fuse.rewrite.pipeline import run_passes
from fuse.testing import assert_fuses

aten = torch.ops.aten


def swish(x):
    return x * torch.sigmoid(x)


class Gated(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(x) * x, (y.t() * torch.sigmoid(y).t()).sum(1)


def fired(report: fuse.Report, pattern: str) -> int:
    return sum(one.count for one in report.fired if one.pattern == pattern)


def test_a_match_becomes_one_kernel(registered):
    registered(swish)

    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x) * x

    report = assert_fuses(Alone(), randn(4, 8), launches=1, fired={"match_patterns": 1, "fuse_pointwise": 0})
    assert report.after.by_kind["region"] == 1


def test_later_passes_let_the_region_grow(registered):
    registered(swish)
    report = assert_fuses(Gated(), randn(4, 8), randn(4, 8))
    assert report.before.launches == 5
    assert fired(report, "swish") == 1  # the other sigmoid is turned before it is multiplied
    assert report.after.launches <= 2


class Tail:
    """relu(x @ w + skip), the sum made by addmm."""

    def pattern(self, x=fuse.tensor(dtype="T"), w=fuse.tensor(dtype="T"), skip=fuse.tensor(dtype="T")):
        return torch.relu(x @ w + skip)

    def replace(self, x, w, skip):
        return torch.addmm(skip, x, w).clamp(min=0)


class TailModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(8, 8))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.relu(y + x @ self.weight)
        second = F.relu(torch.matmul(first, self.weight) + x)
        return second, first.t()


def test_a_replacement_stands_for_the_match(registered):
    registered(Tail)
    report = assert_fuses(TailModel(), randn(4, 8), randn(4, 8), rejected={"match_patterns": 0})
    assert fired(report, "Tail") == 2
    called = [n.target for m in report.graph.modules() if isinstance(m, GraphModule) for n in m.graph.nodes]
    assert called.count(aten.addmm.default) == 2
    assert aten.mm.default not in called


def test_a_replacement_sees_constants_and_alternatives(registered):
    @registered
    class Scaled:
        def pattern(self, x):
            return torch.tanh(fuse.either(torch.exp(x), torch.sin(x), name="which") * fuse.const("c"))

        def replace(self, x):
            inner = fuse.either(lambda: torch.exp(x), lambda: torch.sin(x), name="which")
            return torch.tanh(inner * fuse.const("c"))

    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(x.exp() * 0.5), torch.tanh(torch.sin(x) / 4)

    report = assert_fuses(Both(), randn(5))
    assert fired(report, "Scaled") == 2


def test_a_replacement_in_another_layout_is_copied_into_eagers(registered):
    @registered
    class Turned:
        def pattern(self, x, w):
            return torch.tanh(x @ w)

        def replace(self, x, w):
            return torch.tanh((w.t() @ x.t()).t())

    class Product(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return torch.tanh(x @ w)

    report = assert_fuses(Product(), randn(3, 4), randn(4, 5))
    assert fired(report, "Turned") == 1


def test_a_result_that_the_graph_holds_in_another_shape(registered):
    @registered
    class Linear:
        def pattern(self, x, w, b):
            return F.linear(x, w, b)

        def replace(self, x, w, b):
            return x @ w.t() + b

    class Model(nn.Module):
        def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return F.linear(x, w, b)

    report = assert_fuses(Model(), randn(2, 3, 4), randn(5, 4), randn(5))
    assert fired(report, "Linear") == 1


def test_a_result_that_is_turned_and_copied_before_it_is_put_in_another_shape(registered):
    @registered
    class Merged:
        def pattern(self, x=fuse.tensor("b", "h", "s", "d")):
            return torch.sin(x).exp().transpose(1, 2).flatten(2)

        def replace(self, x):
            return x.transpose(1, 2).sin().exp().flatten(2)

        def examples(self):
            return randn(2, 3, 4, 5)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(x.sin()).transpose(1, 2).reshape(2, 4, 15)

    report = assert_fuses(Model(), randn(2, 3, 4, 5))
    assert fired(report, "Merged") == 1


@pytest.mark.parametrize(
    ("replacement", "reason"),
    [
        (lambda x: x.sin().exp()[:2], "constraint: replace gives float32[2], the pattern float32[4]"),
        (lambda x: x.sin().exp().double(), "constraint: replace gives float64[4], the pattern float32[4]"),
        (lambda x: (x.sin().exp(), x), "constraint: replace gives 2 results, the pattern 1"),
        (lambda x: x, "alias or mutation: the caller would see a result in another tensor's memory"),
        (lambda x: x.sin().exp().view(2, 2).t().t().reshape(4)[:], None),
        (lambda x: x.view(7, 11).sin().exp(), "constraint: replace does not run on these tensors: it fails at"),
        (lambda x: x.add_(1), "constraint: replace does not run on these tensors: it writes to an input"),
    ],
)  # fmt: skip
def test_a_replacement_that_does_not_fit_is_declined(registered, replacement, reason):
    class Double:
        def pattern(self, x):
            return torch.exp(torch.sin(x))

        def replace(self, x):
            return replacement(x)

    registered(Double)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(torch.sin(x))

    report = fuse.show(Model(), (randn(4),), passes=["match_patterns"])
    reasons = [one.reason for one in report.rejected]
    assert (reasons == []) if reason is None else reasons[0].startswith(reason)


def test_a_view_of_an_input_stays_a_view_of_it(registered):
    @registered
    class Both:
        def pattern(self, x):
            return x.t(), torch.exp(x.t())

        def replace(self, x):
            return x.t().clone(), torch.exp(x).t()

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            return y.t(), torch.exp(y.t())

    assert_fuses(Model(), randn(3, 4))


def test_a_pattern_whose_results_are_read_by_another_match(registered):
    @registered
    class Chain:
        def pattern(self, x):
            return torch.sin(torch.exp(x))

        def replace(self, x):
            return torch.exp(x).sin()

    class Thrice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.sin(torch.exp(x))
            return x

    report = assert_fuses(Thrice(), randn(3, 4))
    assert fired(report, "Chain") == 3


def test_heads_that_are_turned_before_reach_the_replacement_as_the_pattern_wants_them(registered):
    @registered
    class Attention:
        def pattern(self, q, k, v):
            return torch.softmax(q @ k.transpose(-2, -1) / fuse.const("scale"), -1) @ v

        def replace(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, scale=1 / fuse.const("scale"))

    class Model(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            q, k, v = (F.linear(x, w).view(2, 5, 3, 3, 8).permute(2, 0, 3, 1, 4)).unbind(0)
            return (torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1) @ v).transpose(1, 2).reshape(2, 5, 24)

    report = assert_fuses(Model(), randn(2, 5, 24), randn(72, 24))
    assert fired(report, "Attention") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4, 5)])
def test_values_are_eagers_for_all_dtypes_and_shapes(registered, dtype, shape):
    registered(swish)

    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x) * x

    report = assert_fuses(Alone(), (randn(shape) * 4).to(dtype))
    assert fired(report, "swish") == 1


def test_a_result_that_is_read_before_the_last_one_is_there(registered):
    @registered
    def both(x, z):
        y = torch.exp(x)
        return y, torch.tanh(z) * y

    class Early(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.exp(x)
            return y.neg(), torch.tanh(x.sin()) * y

    graph = capture(Early(), (randn(3),))
    ledger = run_passes(graph, passes=["match_patterns"])
    assert ([one.pattern for one in ledger.fired], ledger.failed) == (["both"], ())


def test_a_region_says_what_its_loops_run_over_where_that_is_one_thing():
    def chain(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.exp(x), torch.sin(x), torch.exp(y), torch.sin(y)

    graph = capture(Function(chain), (randn(4, 3), randn(5)))
    ex, sx, ey, sy = graph.graph.output_node().all_input_nodes
    assert isinstance(domain([ex, sx]), Domain)
    assert isinstance(domain([sy]), Domain)
    assert domain([ex, ey, sy]) is None


def test_a_match_is_given_to_later_passes_with_its_domain(registered):
    registered(swish)
    graph = capture(Gated(), (randn(4, 8), randn(4, 8)))
    run_passes(graph, passes=["match_patterns"])
    (call,) = graph.graph.find_nodes(op="call_module")
    assert isinstance(graph.get_submodule(call.target).meta["domain"], Domain)


def test_a_broken_pattern_is_named_and_harms_no_other(registered):
    @registered
    def broken(x):
        raise ValueError("not today")

    registered(swish)
    report = assert_fuses(Gated(), randn(4, 8), randn(4, 8))
    assert fired(report, "swish") == 1
    (rejected,) = [one for one in report.rejected if one.pattern == "broken"]
    assert "does not run with any guess" in rejected.reason


@pytest.mark.parametrize(("gated", "count"), [("h", 1), ("x", 0)])
def test_a_pattern_matches_in_the_body_of_a_loop_once_not_once_for_each_step(registered, monkeypatch, gated, count):
    registered(swish)
    monkeypatch.setattr(Loop, "persistent", False)

    class Step(nn.Module):
        def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.sigmoid(h) * {"h": h, "x": x}[gated] + x
            return h, h

    body = capture(Step(), (randn(4), randn(4)))
    graph = Graph()
    h, xs = graph.placeholder("h"), graph.placeholder("xs")
    mode = surgery.fake_mode(body.graph)
    h.meta.update(val=mode.from_tensor(randn(4)), source="")
    xs.meta.update(val=mode.from_tensor(randn(10, 4)), source="")
    call = graph.call_module("loop", (h, xs))
    call.meta.update(val=(h.meta["val"],), source="")
    graph.output((call,))
    spec = LoopSpec(10, 1, (), 1)
    whole = GraphModule({"loop": Loop(body, spec)}, graph)
    ledger = run_passes(whole, passes=["match_patterns"])
    fired = [(one.pattern, one.count, one.launches_saved) for one in ledger.fired]
    assert fired == [("swish", 1, 10)] * count


@pytest.mark.parametrize("train", [False, True])
def test_the_mask_of_a_dropout_is_given_to_a_pattern(registered, train):
    @registered
    class DropAdd:
        def pattern(self, x, residual, mask):
            kept = residual + x * mask
            return torch.tanh(kept), kept

        def replace(self, x, residual, mask):
            kept = torch.addcmul(residual, x, mask)
            return torch.tanh(kept), kept

    class Model(nn.Module):
        def forward(self, x, residual):
            kept = F.dropout(x, 0.1) + residual
            return torch.tanh(kept), kept

    given = [randn(2, 8, requires_grad=train) for _ in range(2)]
    assert fired(fuse.show(Model(), tuple(given), train=train), "DropAdd") == 1


def test_a_match_in_a_loop_that_runs_as_one_kernel_is_told(registered):
    @registered
    class Gated:
        def pattern(self, x, y):
            return torch.tanh(x) * torch.sigmoid(y)

        def replace(self, x, y):
            return torch.sigmoid(y) * torch.tanh(x)

    class Steps(nn.Module):
        def forward(self, xs, h):
            for x in xs:
                h = torch.tanh(x) * torch.sigmoid(h) + h.sin()
            return h

    report = fuse.show(Steps(), (randn(8, 4, 6), randn(4, 6)))
    assert report.after.launches == 1
    (rejected,) = [one for one in report.rejected if one.pattern == "Gated"]
    reason = "in a loop kernel: one launch runs all steps of the loop, with these operators in it"
    assert (rejected.reason, rejected.count) == (reason, 1)
    (gated,) = [one for one in registry.registered() if one.name == "Gated"]
    explained = explain(Steps(), (randn(8, 4, 6), randn(4, 6)), None, gated)
    assert [f"{one.kind}: {one.reason}" for one in explained.outcomes] == [reason]


def test_a_result_that_is_an_input_for_these_ranks_stays_the_input(registered):
    @registered
    class Both:
        def pattern(self, x):
            turned = x.t()  # of one dimension nothing is turned
            return turned, torch.exp(turned) * 2

        def replace(self, x):
            turned = x.t()
            return turned.clone(), turned.exp() * 2

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            turned = (x * 3).t()
            return turned + 1, torch.exp(turned) * 2

    assert fired(assert_fuses(Model(), randn(3)), "Both") == 1
