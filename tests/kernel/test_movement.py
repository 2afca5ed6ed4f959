"""Views, copies and constructors inside kernels: the right element at the right place, in eager's layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fuse.kernel.kernel import Declined

Cases = dict[str, tuple[Any, ...]]

aten = torch.ops.aten


def counted(*shape: int) -> Tensor:
    """Every element another number, so that a misplaced one shows."""
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


def cases() -> Cases:
    x, y = counted(4, 6), -counted(4, 6)
    cube, image = counted(2, 3, 4), counted(2, 3, 4, 5)
    last = image.to(memory_format=torch.channels_last)
    return {
        "transpose": (lambda x: (x + 1).t().contiguous(), x),
        "transposed result": (lambda x: (x + 1).t() * 2, x),
        "transposed input": (lambda x, y: x * y, counted(6, 4).t(), y),
        "both transposed": (lambda x, y: x * y, counted(6, 4).t(), counted(6, 4).t()),
        "sliced input": (lambda x: x * 2, counted(8, 12)[1:5, 2:12:3]),
        "expanded input": (lambda x, y: x * y, counted(1, 6).expand(4, 6), y),
        "row plus column": (lambda x, y: x + y, counted(4, 1), counted(6)),
        "scalars": (lambda x, y: x * y, torch.tensor(2.0), torch.tensor(3.0)),
        "scalar with tensor": (lambda x, y: x * y, x, torch.tensor(3.0)),
        "many ones": (lambda x, y: x * y, counted(1, 4, 1, 6, 1), counted(1, 1, 1, 6, 1)),
        "permute": (lambda x: (x + 1).permute(2, 0, 1).contiguous(), cube),
        "view splits": (lambda x: (x + 1).view(2, 2, 6).transpose(0, 1).contiguous(), x),
        "view joins": (lambda x: x.transpose(0, 1).contiguous().view(3, 8) * 2, cube),
        "view of a view": (lambda x: (x + 1).view(24).view(3, 8).view(2, 12).contiguous() * 2, x),
        "heads": (lambda x: (x + 1).view(2, 6, 4, 8).transpose(1, 2).contiguous(), counted(2, 6, 32)),
        "flatten and unsqueeze": (lambda x: (x * 2).flatten(1).unsqueeze(1) + 1, cube),
        "squeeze": (lambda x: (x * 2).squeeze(1) + 1, counted(4, 1, 3)),
        "select": (lambda x: (x * 2)[:, -1] + 1, x),
        "slice with a step": (lambda x: (x * 2)[1:, ::2] + 1, x),
        "slice out of range": (lambda x: (x * 2)[-100:3, 2:100] + 1, x),
        "diagonal": (lambda x: (x * 2).diagonal() + 1, x),
        "diagonal above": (lambda x: (x * 2).diagonal(2, 1, 2) + 1, cube),
        "diagonal below": (lambda x: (x * 2).diagonal(-1, -1, 0) + 1, cube),
        "flip": (lambda x: x.flip(0, 1) * 2, x),
        "roll by cat": (lambda x: torch.cat([x[2:], x[:2]]) * 2, x),
        "pixel shuffle": (lambda x: functional.pixel_shuffle(x * 2, 2) + 1, counted(2, 8, 3, 5)),
        "pixel unshuffle": (lambda x: functional.pixel_unshuffle(x * 2, 3) + 1, counted(2, 2, 6, 9)),
        "roll": (lambda x: x.roll(2, 1) * 2, x),
        "roll in two directions": (lambda x: (x * 2).roll((1, -9), (0, 2)), cube),
        "roll by nothing": (lambda x: x.roll(6, 1) + 1, x),
        "repeat": (lambda x: x.repeat(2, 3) * 2, x),
        "repeat adds dimensions": (lambda x: x.repeat(2, 1, 3) * 2, x),
        "expand then reshape": (lambda x: (x * 2)[:, None].expand(4, 3, 6).reshape(12, 6) + 1, x),
        "cat": (lambda x, y: torch.cat([x * 2, y + 1], 1), x, y),
        "cat first": (lambda x, y: torch.cat([x, y + 1, x], 0), x, y),
        "cat of other dtypes": (lambda x, y: torch.cat([x, y], -1), x, torch.arange(8).view(4, 2)),
        "cat of broadcasts": (lambda x, y: torch.cat([x + y, y.expand(4, 6)], 0), x, counted(6)),
        "cat in the middle": (lambda x, y: torch.tanh(torch.cat([x, y], 1)) * 2, x, y),
        "cat of one": (lambda x: torch.cat([x * 2]), x),
        "cat of transposed": (lambda x, y: torch.cat([x.t(), y.t() * 2]), x, y),
        "sliced cat": (lambda x, y: torch.cat([x, y], 1)[:, 3:9] * 2, x, y),
        "stack": (lambda x, y: torch.stack([x, y * 3], 1), x, y),
        "stack last": (lambda x, y: torch.stack([x, y], -1) * 2, x, y),
        "pad": (lambda x: functional.pad(x * 2, (1, 2, 3, 0), value=5.0), x),
        "pad and use": (lambda x, y: functional.pad(x, (2, 0)) + functional.pad(y, (0, 2)), x, y),
        "cut at both ends": (lambda x: functional.pad(x * 2, (-1, -2, -1, 0)) + 1, x),
        "cut and pad": (lambda x: functional.pad(x * 2, (-1, 2, 3, -2), value=5.0), x),
        "pad channels last": (lambda x: functional.pad(x * 2, (1, 1)), last),
        "tril": (lambda x: x.tril(1), counted(3, 5, 5)),
        "triu": (lambda x: (x * 2).triu(-1), x),
        "tril of bools": (lambda x: torch.ones_like(x, dtype=torch.bool).tril(), x),
        "diag_embed": (lambda x: (x * 2).diag_embed() + 1, x),
        "diag_embed in front": (lambda x: x.diag_embed(0, 0, -2) - 1, x),
        "diag_embed of bools": (lambda x: (x > 2).diag_embed(dim1=-1, dim2=0), x),
        "diagonal_scatter": (lambda x, y: torch.diagonal_scatter(x, y[0, :4]) * 2, x, y),
        "diagonal_scatter above": (lambda x, y: torch.diagonal_scatter(x * 2, y[:, 1], 2), x, y),
        "diagonal_scatter below": (lambda x, y: torch.diagonal_scatter(x.t(), y[:, 1], -2) + 1, x, y),
        "diagonal_scatter into a tall one": (lambda x, y: torch.diagonal_scatter(x.t(), y[0, :4]) * 2, x, y),
        "diagonal_scatter in front": (lambda x: torch.diagonal_scatter(x, x[0, :2].t() + 1, 0, 1, 0), cube),
        "diagonal_backward": (lambda x: aten.diagonal_backward(x * 2, (6, 3, 3), 0, 1, 2) + 1, counted(6, 3)),
        "slice_scatter": (lambda x, y: torch.slice_scatter(x, y[:, :3], 1, 2, 5) * 2, x, y),
        "slice_scatter with steps": (lambda x, y: torch.slice_scatter(x, y[:, :3], 1, 1, 6, 2) * 2, x, y),
        "slice_scatter of one column, with steps": (
            lambda x, y: torch.slice_scatter(x, y[:, :1], 1, 4, 6, 7) * 2,
            x,
            y,
        ),
        "slice_scatter of the only column, with steps": (
            lambda x, y: torch.slice_scatter(x[:, :1] + 1, y[:, :1], 1, 0, 2**63 - 1, 2) * 2,
            x,
            y,
        ),
        "slice_scatter of one row": (lambda x, y: torch.slice_scatter(x, y[3:], 0, 3, 4, 4) + 1, x, y),
        "slice_backward with steps": (lambda x: aten.slice_backward(x + 1, (4, 18), 1, 2, 18, 3) * 2, x),
        "slice_backward to the end in steps": (lambda x: aten.slice_backward(x, (12, 6), 0, 1, 2**63 - 1, 3), x),
        "select_scatter": (lambda x, y: torch.select_scatter(x, y[:, 0], 1, -1), x, y),
        "select_backward": (lambda x: aten.select_backward(x * 2, (4, 3, 6), -2, 1) + 1, x),
        "select_backward of the last": (lambda x: aten.select_backward(x, (2, 4, 6), 0, -1), x),
        "slice_backward": (lambda x: aten.slice_backward(x + 1, (4, 9), 1, 2, 8, 1) * 2, x),
        "slice_backward to the end": (lambda x: aten.slice_backward(x, (7, 6), 0, -4, 2**63 - 1, 1), x),
        "constants": (lambda x: x + torch.full_like(x, 2.0) + torch.ones(6) + torch.zeros(4, 1), x),
        "arange": (lambda x: x * torch.arange(6) + torch.arange(4, 0, -1)[:, None], x),
        "arange of floats": (lambda x: x * torch.arange(0.0, 12.0, 2.0), x),
        "channels last": (lambda x: torch.tanh(x) * 2, last),
        "to channels last": (lambda x: (x * 2).to(memory_format=torch.channels_last), image),
        "channels last to plain": (lambda x: (x * 2).contiguous(), last),
        "mixed layouts": (lambda x, y: x * y, last, image),
        "copy": (lambda x, y: x.clone().copy_(y) + 1, x, torch.arange(6)),
        "copies only": (lambda x: x.clone(), counted(6, 4).t()),
        "two shapes": (lambda x: (x * 2, x[0] + 1), x),
        "nests of single elements": (lambda x, y: (x * 2, x + 1, y.view(()) * 2, y * 3), counted(1, 1), counted(1)),
        "bools": (lambda x, y: torch.cat([x > 2, y > 2], 1), x, y),
        "halves": (lambda x, y: torch.cat([x, y * 2], 1).t().contiguous(), x.half(), y.half()),
    }


@pytest.fixture(scope="module")
def ran(run_together: Callable[..., Any]) -> Any:
    return run_together(cases())


@pytest.mark.parametrize("name", list(cases()))
def test_every_element_stands_where_eager_has_it(ran: Any, name: str) -> None:
    ran[name].check(exact=name not in ("cat in the middle", "channels last"))


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """A tensor that broadcasts to ``shape``: some extents 1, permuted, sliced or expanded memory."""
    rank = draw(st.integers(0, len(shape)))
    own = [1 if draw(st.booleans()) and draw(st.booleans()) else extent for extent in shape[len(shape) - rank :]]
    order = draw(st.permutations(range(rank)))
    steps = [draw(st.sampled_from((1, 1, 2))) for _ in range(rank)]
    memory = torch.arange(float(torch.Size(e * s for e, s in zip(own, steps, strict=True)).numel()))
    laid_out = memory.view([own[d] * steps[d] for d in order]).permute([order.index(d) for d in range(rank)])
    sliced = laid_out[tuple(slice(None, None, step) for step in steps)]
    return sliced.expand(shape) if draw(st.booleans()) else sliced


View = Callable[[Tensor], Tensor]


def _unsqueezed(dim: int) -> View:
    return lambda t: t.unsqueeze(dim)


def _flipped(dim: int) -> View:
    return lambda t: t.flip(dim)


def _permuted(order: Sequence[int]) -> View:
    return lambda t: t.permute(tuple(order))


def _second_half(dim: int) -> View:
    return lambda t: t.narrow(dim, t.shape[dim] // 2, t.shape[dim] - t.shape[dim] // 2)


def _regrouped(t: Tensor) -> Tensor:
    return t.reshape(-1, 2) if t.numel() % 2 == 0 else t.reshape(-1)


@st.composite
def view_of(draw: st.DrawFn, rank: int) -> View:
    choices = [st.just(_regrouped), st.integers(0, rank).map(_unsqueezed)]
    if rank:
        dims = st.integers(0, rank - 1)
        choices += [dims.map(_flipped), dims.map(_second_half), st.permutations(range(rank)).map(_permuted)]
    return draw(st.one_of(choices))


@st.composite
def functions(draw: st.DrawFn) -> tuple[Any, ...]:
    """An expression over strided, broadcast inputs, then a chain of views."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=0, max_size=4)))
    inputs = [draw(strided(shape)) for _ in range(2)]
    base = torch.arange(float(torch.Size(shape).numel())).view(shape)
    views: list[View] = []
    current = base
    for _ in range(draw(st.integers(0, 3))):
        views.append(draw(view_of(current.dim())))
        current = views[-1](current)

    def function(a: Tensor, x: Tensor, y: Tensor) -> Tensor:
        value = a + x * y - y
        for view in views:
            value = view(value)
        return value * 2

    return function, base, *inputs


@settings(
    max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(st.lists(functions(), min_size=25, max_size=25))
def test_any_broadcast_of_any_layout_through_any_views_is_eagers(
    run_together: Callable[..., Any], programs: list[tuple[Any, ...]]
) -> None:
    ran = run_together({str(i): program for i, program in enumerate(programs)}).values()
    made = [one for one in ran if not isinstance(one.kernel, Declined)]
    assert len(made) > len(programs) / 2
    for one in made:
        one.check(exact=True)


@st.composite
def writes_in_steps(draw: st.DrawFn) -> tuple[Any, ...]:
    """``x[:, start:end:step] = y`` as an operator, wherever the stretch begins and ends."""
    extent, dim = draw(st.integers(1, 9)), draw(st.integers(0, 1))
    start, step = draw(st.integers(0, extent - 1)), draw(st.integers(2, 5))
    end = draw(st.integers(start + 1, extent))
    x = counted(3, extent) if dim else counted(extent, 3)
    y = x.narrow(dim, 0, len(range(start, end, step))) + 100
    return (lambda x, y: torch.slice_scatter(x * 2, y + 1, dim, start, end, step)), x, y


@settings(
    max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(st.lists(writes_in_steps(), min_size=25, max_size=25))
def test_any_write_in_steps_is_eagers(run_together: Callable[..., Any], programs: list[tuple[Any, ...]]) -> None:
    for one in run_together({str(i): program for i, program in enumerate(programs)}).values():
        assert not isinstance(one.kernel, Declined), one.kernel
        one.check(exact=True)


DECLINED: dict[str, tuple[tuple[Any, ...], str]] = {
    "regrouping": ((lambda x: (x.t().contiguous() + 1).view(4, 6) * 2, counted(4, 6)), "fits no loop order"),
    "nothing": ((lambda x: torch.cat([x * 2, x[:, :0]], 1), counted(4, 6)), "has no elements"),
    "rows as pieces": ((lambda x: torch.stack([x.sum(1), x.mean(1)]), counted(4097, 3)), "more than 4096 results"),
    "too large": ((lambda x: (x > 300) & (x < 3), torch.arange(8, dtype=torch.int8)), "int8 cannot hold 300"),
    "complex": ((lambda x: x * 2, torch.ones(3, dtype=torch.complex64)), "complex64 is not supported"),
}


@pytest.mark.parametrize("name", list(DECLINED))
def test_what_no_loops_follow_is_declined_with_a_reason(lowered: Callable[..., Any], name: str) -> None:
    call, reason = DECLINED[name]
    kernel = lowered(*call).kernel
    assert isinstance(kernel, Declined)
    assert reason in kernel.reason
