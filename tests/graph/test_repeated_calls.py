"""What a capture remembers of operators changes nothing of what it records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

import fuse
from fuse.errors import CaptureError
from fuse.graph.backward.joint import capture_joint
from fuse.graph.functional.repeated_calls import RepeatedCalls

STEPS = 5


class Cell(nn.Module):
    """Everything that a step may do, ``STEPS`` times."""

    def __init__(self, step: Callable[[Cell, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.step = nn.Linear(6, 6), nn.LayerNorm(6), step

    def forward(self, x: Tensor) -> Any:
        h = torch.zeros(4, 6)
        seen = []
        for t in range(STEPS):
            h = self.step(self, x[t], h)
            seen.append(h)
        return h, seen[1], torch.stack([s.sum() for s in seen])


def gates(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    a, b = cell.linear(h + x).chunk(2, 1)
    return torch.cat([torch.tanh(a), b.sigmoid() * 2.0], 1)


def norms(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    return F.dropout(cell.norm(h + x), 0.5) @ cell.linear.weight.t()


def writes(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    h = h.clone()
    row = h[1:3]
    row.add_(x[1:3])
    before = h.t()[0] * 1.0
    h[:, 0] = before + 1
    return row.new_ones(4, 1) * h.view(2, 2, 6).flatten(0, 1)


def writes_gates(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    whole = cell.linear(h + x) * 1.0
    a, b = whole[:, :3], whole[:, 3:]
    a.add_(b).mul_(0.5)
    whole.mul_(2.0).sub_(x, alpha=0.5)
    return torch.cat([a, b], 1).masked_fill_(x > 1, 0).sigmoid_()


def copies_into_rows(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    out = torch.empty(4, 6)
    out[:2] = x[:2].double()
    out[2:].copy_(h[2:])
    out[3] = 1.5
    return out


def writes_what_it_reads(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    h = h + x
    h.add_(h)
    h[:2].add_(h[2:])
    return h.sub_(h.sum())


def writes_an_argument(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    x.mul_(0.5)
    return h + x


def other_strides(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    turned = (h.t() + x.t()).contiguous().t()
    return (turned * x).unsqueeze(0).squeeze(0).expand(4, 6)


def grows(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    return torch.cat([h, x])[-4 - h.shape[0] :]


def reshapes_in_place(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    h = h * x
    return (h.unsqueeze_(0)[0] * 2).transpose_(0, 1).t() + 1


def of_another_dtype(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    return (h.double() + x).float() + (h > 0).int()


def takes_turns(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    if x.storage_offset() % 48:
        return h.tanh() * x + h.sigmoid() * h.tanh()
    return h.tanh() + x * h.sigmoid() + h.tanh()


def numbers_of_all_types(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    counts = x.int()
    for number in (1, 1.0, True, 2):
        counts = (counts + number).int() * 2
    return h * counts + x.sum(1, keepdim=True)


def lists_of_tensors(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    pair = torch.stack([h, x])
    return torch.cat([pair[0, :2], pair[1, 2:]]) + h[[0, 1, 2, 3]] + torch.cat([x[:1], h[:3]])


def several_results(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    most, where = (h + x).max(1)
    deviation, mean = torch.std_mean(h, 1)
    return h * most[:, None] + where[:, None] - deviation[:, None] * mean[:, None]


def changes_the_default_dtype(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64 if x.storage_offset() % 48 else torch.float32)
    halves = h.int() / 2
    torch.set_default_dtype(torch.float32)
    return (halves * x).float()


def catches_errors(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    try:
        return h @ x
    except RuntimeError:
        return h @ x.t() @ x


def chosen_by_a_mask(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    h = h + x
    h[x > 0] = h[x > 0] * 2 + x[x > 0]
    return h * 0.5


def reads_old_views(cell: Cell, x: Tensor, h: Tensor) -> Tensor:
    h = h * 1.0
    rows, columns = h[1:], h.t()
    sums = rows + 1, columns * 2
    h.mul_(x)
    return h + (rows + 1).sum() + (columns * 2).t() - sums[0].sum() + sums[1].t()


def described(graph: GraphModule) -> Any:
    """All that a capture says, tensors by their layouts."""

    def shown(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            facts = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.fake_device)
            return (*facts, value.requires_grad)
        if isinstance(value, (tuple, list)):
            return [shown(one) for one in value]
        return str(value)

    nodes = [(node.format_node(), shown(node.meta["val"]), node.meta["source"]) for node in graph.graph.nodes]
    signature = graph.meta["signature"]
    dispatches = [(str(d.op), shown(d.args), shown(d.result), d.source) for d in signature.dispatches]
    return nodes, dispatches, signature.inputs, [shown((o.kind, o.index, o.view)) for o in signature.outputs]


STEPS_OF_ALL_KINDS = [
    gates,
    norms,
    writes,
    writes_gates,
    copies_into_rows,
    writes_what_it_reads,
    writes_an_argument,
    other_strides,
    grows,
    reshapes_in_place,
    of_another_dtype,
    takes_turns,
    numbers_of_all_types,
    lists_of_tensors,
    several_results,
    changes_the_default_dtype,
    catches_errors,
    chosen_by_a_mask,
    reads_old_views,
]


@pytest.mark.parametrize("step", STEPS_OF_ALL_KINDS)
@pytest.mark.parametrize("trained", [False, True])
def test_a_capture_that_remembers_records_what_one_that_asks_records(
    step: Callable[[Cell, Tensor, Tensor], Tensor], trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trained and step is writes_an_argument:
        pytest.skip("what it writes needs gradients then, which is refused")
    if trained and step is chosen_by_a_mask:
        pytest.skip("the gradient of such a write reads a mask that nobody has counted, which is refused")
    cell, x = Cell(step), torch.randn(STEPS, 4, 6, requires_grad=trained)
    remembered = 0
    record = RepeatedCalls.record

    def counted(self: RepeatedCalls, *call: Any) -> Any:
        nonlocal remembered
        result = record(self, *call)
        remembered += result is not NotImplemented
        return result

    def captures() -> list[Any]:
        if not trained:
            return [described(fuse.capture(cell, (x,)))]
        joint = capture_joint(cell, (x,))
        return [described(graph) for graph in (joint.forward, joint.backward) if graph is not None]

    monkeypatch.setattr(RepeatedCalls, "record", counted)
    found = captures()
    assert remembered >= 2 * STEPS
    monkeypatch.setattr(RepeatedCalls, "record", lambda self, *call: NotImplemented)
    assert found == captures()


def test_what_eager_has_no_code_for_is_refused_at_its_first_step_and_where_only_a_number_differs() -> None:
    class Shifts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for amount in (1, 2, 300):
                x = x + amount
            return x

    with pytest.raises(CaptureError, match="300"):
        fuse.capture(Shifts(), (torch.zeros(3, dtype=torch.int8),))
