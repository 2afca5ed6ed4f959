"""Writes through views become values: every case is replayed and held to eager, on fresh tensors and on arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from fuse.errors import CaptureError
from fuse.graph.capture import capture

Write = Callable[[Tensor], Any]

WRITES: dict[str, Write] = {
    "a_row": lambda x: x[1].add_(1),
    "columns": lambda x: x[:, 1:3].mul_(2),
    "every_second": lambda x: x[::2, ::3].zero_(),
    "the_last_of_the_last": lambda x: x[-1, -2:].add_(1),
    "a_transpose": lambda x: x.t().add_(torch.arange(3.0)),
    "a_permutation": lambda x: x.unflatten(1, (2, 2)).permute(2, 0, 1)[1].add_(3),
    "a_flat_view_where_there_is_one": lambda x: x[1].view(-1)[1:3].fill_(5),
    "a_diagonal": lambda x: x.diagonal().neg_(),
    "an_upper_diagonal": lambda x: torch.diagonal(x, 1).add_(1),
    "a_chain": lambda x: x.t()[1:3, 1].exp_(),
    "a_squeezed_row": lambda x: x[:1].squeeze(0).add_(1),
    "a_squeezed_element": lambda x: x[:1, :1].squeeze().add_(1),
    "one_of_split": lambda x: x.split(2, 1)[1].add_(1),
    "one_of_split_by_sizes": lambda x: x.split([1, 3], 1)[1].add_(1),
    "one_of_chunk": lambda x: x.chunk(3, 1)[1].add_(1),
    "one_of_unbind": lambda x: x.unbind(1)[2].add_(1),
    "one_of_tensor_split": lambda x: x.tensor_split(3, 1)[1].add_(1),
    "one_of_unsafe_split": lambda x: x.unsafe_split(2, 1)[1].add_(1),
    "detached": lambda x: x.detach().add_(1),
    "data": lambda x: x.data.add_(1),
    "a_copy_by_reshape": lambda x: x.t().reshape(-1).add_(1),
    "rows_that_read_each_other": lambda x: (x[0].add_(x[1]), x[1].add_(x[0])),
    "item_by_number": lambda x: x.__setitem__(1, 7.0),
    "item_by_slice": lambda x: x.__setitem__((slice(None), 1), torch.ones(3)),
    "item_by_mask": lambda x: x.__setitem__(x > 0, 0.0),
    "item_by_tensor": lambda x: x.__setitem__(torch.tensor([0, 2]), torch.ones(4)),
    "item_by_list": lambda x: x.__setitem__([0, 2], 1.0),
    "item_by_steps": lambda x: x.__setitem__((..., slice(0, 4, 2)), 9.0),
    "copy_from_integers": lambda x: x.copy_(torch.arange(12).view(3, 4)),
    "copy_broadcast": lambda x: x.copy_(torch.arange(4)),
    "copy_other_strides": lambda x: x.copy_(torch.arange(12.0).view(4, 3).t()),
    "copy_of_itself": lambda x: x[0].copy_(x[1]),
    "copy_flipped": lambda x: x.copy_(x.flip(0)),
    "fill_with_a_tensor": lambda x: x.fill_(torch.tensor(2)),
    "masked_fill": lambda x: x.masked_fill_(x > 0, -1),
    "masked_scatter": lambda x: x.masked_scatter_(x > 0, torch.ones(12)),
    "index_put_that_adds": lambda x: x.index_put_((torch.tensor([0, 0]), torch.tensor([1, 1])), x[0, 0].sin(), True),
    "index_add": lambda x: x.index_add_(0, torch.tensor([0, 2]), torch.ones(2, 4)),
    "index_copy": lambda x: x.index_copy_(0, torch.tensor([0, 2]), torch.ones(2, 4)),
    "index_fill": lambda x: x.index_fill_(1, torch.tensor([0]), 2.0),
    "scatter": lambda x: x.scatter_(1, torch.zeros(3, 1, dtype=torch.long), 5.0),
    "scatter_that_adds": lambda x: x.scatter_add_(1, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)),
    "product": lambda x: x.round_().addmm_(torch.ones(3, 2), torch.ones(2, 4)),
    "lerp": lambda x: x.lerp_(torch.ones(4), 0.5),
    "relu": lambda x: F.relu_(x),
    "comparison_keeps_the_type": lambda x: x.eq_(0),
    "division_that_rounds": lambda x: x.div_(2, rounding_mode="floor"),
    "cumulative_sum": lambda x: x.cumsum_(1),
    "triangle": lambda x: x.tril_(),
    "out_on_itself": lambda x: torch.add(x, 1, out=x),
    "out_on_a_new_tensor": lambda x: torch.mul(x, 2, out=torch.empty(3, 4)),
    "out_on_other_strides": lambda x: torch.mul(x, 2, out=torch.empty(4, 3).t()),
    "out_on_a_row": lambda x: torch.add(x[0], 1, out=x[1]),
    "out_of_two": lambda x: torch.max(x, 1, out=(torch.empty(3), torch.empty(3, dtype=torch.long))),
    "out_of_cat": lambda x: torch.cat([x, x], out=torch.empty(6, 4)),
    "out_of_a_factory": lambda x: torch.arange(3, out=torch.empty(3)),
    "out_of_ones": lambda x: torch.ones(3, 4, out=torch.empty(4, 3, dtype=torch.long).t()),
    "shape_of_a_copy": lambda x: x.clone().unsqueeze_(0).add_(1),
    "shape_squeezed": lambda x: x.clone().view(3, 1, 4).squeeze_(1).add_(1),
    "shape_after_a_write": lambda x: (x[:1] + 1).mul_(2).squeeze_(0).add_(1),
    "shape_of_one_of_two_results": lambda x: x.add_(x.sort()[0].mul_(2).unsqueeze_(0)[0]),
    "shape_transposed": lambda x: x.clone().t_().mul_(2),
}  # fmt: skip

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.randn(3, 4),
    "later_in_its_storage": lambda: torch.randn(6, 4)[2:5],
    "with_gaps": lambda: torch.randn(3, 9)[:, 2:6],
    "transposed": lambda: torch.randn(4, 3).t(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_to_a_tensor_of_its_own_is_eagers(write: Write, same_function: Callable[..., GraphModule]) -> None:
    def function(x: Tensor) -> Any:
        x = x * 1
        return x, write(x), x + 1

    same_function(function, torch.randn(3, 4))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_to_an_argument_is_eagers(
    write: Write, layout: Callable[[], Tensor], same_function: Callable[..., GraphModule]
) -> None:
    graph = same_function(lambda x: (write(x), x.sum()), layout())
    assert all(mutation.input_index == 0 for mutation in graph.meta["signature"].mutations)


def test_a_write_to_an_argument_is_one_mutation(same_function: Callable[..., GraphModule]) -> None:
    graph = same_function(lambda x: x[1].add_(1).sum() + x[0].mul_(2).sum(), torch.randn(3, 4))
    assert [m.input_index for m in graph.meta["signature"].mutations] == [0]


GROWING: dict[str, Write] = {
    "of_a_result": lambda x: torch.mul(x, 2, out=torch.empty(0)).add_(1),
    "of_a_result_in_another_dtype": lambda x: torch.mul(x, 2, out=torch.empty(0, dtype=torch.float64)),
    "of_a_result_after_it_was_read": lambda x: (lambda o: (o + 1, torch.mul(x, 2, out=o)))(x.new()),
    "of_a_factory_that_grows": lambda x: torch.arange(4, out=x.new().long()) * x,
    "of_a_factory_of_numbers": lambda x: torch.arange(0.0, 0.4, 0.1, out=x.new().double()),
}
"""Writes to an empty tensor, which they resize."""


@pytest.mark.parametrize("write", GROWING.values(), ids=GROWING.keys())
def test_an_empty_tensor_that_a_write_resizes_is_eagers(
    write: Write, same_function: Callable[..., GraphModule]
) -> None:
    same_function(lambda x: (write(x), x + 1), torch.randn(3, 4))


DRAWS: dict[str, Write] = {
    "bernoulli": lambda x: x.bernoulli_(),
    "bernoulli_p": lambda x: x.bernoulli_(0.3),
    "bernoulli_tensor": lambda x: x.bernoulli_(torch.full((5, 8), 0.3)),
    "uniform": lambda x: x.uniform_(),
    "normal": lambda x: x.normal_(),
    "exponential": lambda x: x.exponential_(),
    "random": lambda x: x.random_(9),
    "geometric": lambda x: x.geometric_(0.5),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_random_numbers_fall_where_eager_puts_them(
    draw: Write, transposed: bool, same_function: Callable[..., GraphModule]
) -> None:
    same_function(lambda x: (draw(x), x[2]), torch.zeros(8, 5).t() if transposed else torch.zeros(5, 8))


REFUSED: dict[str, tuple[Write, str]] = {
    "shape_of_an_argument": (lambda x: x.as_strided_((2, 2), (4, 1)), r"aten\.as_strided_.* changes the shape of an"),
    "resized": (lambda x: x.clone().resize_(2, 2), r"aten\.resize_.* changes the size"),
    "out_that_shrinks": (lambda x: torch.mul(x, 2, out=torch.empty(9, 9)), "resizes its out= tensor"),
    "out_that_grows_to_strides": (lambda x: torch.mul(x.t(), 2, out=torch.empty(0)), "resized to other strides"),
    "out_that_grows_and_has_a_view": (
        lambda x: (lambda o: (o.view(0), torch.mul(x, 2, out=o)))(x.new()),
        "resizes its out= tensor",
    ),
    "out_of_two_that_grow": (
        lambda x: torch.max(x, 1, out=(torch.empty(0), torch.empty(0).long())),
        "resizes its out= tensor",
    ),
    "out_that_grows_within_an_argument": (lambda x: torch.mul(x + 1, 2, out=x[:0]), "resizes its out= tensor"),
    "data_of_a_new_tensor_turned_over": (lambda x: setattr(y := x * 2, "data", y.data.t()), r"assigns the \.data"),
    "swapped": (lambda x: torch.utils.swap_tensors(x * 2, x * 3), "swaps it"),
    "windows": (lambda x: x.unfold(1, 2, 2).add_(1), r"view made by aten\.unfold"),
    "other_dtype": (lambda x: x.view(torch.int32).add_(1), r"view made by aten\.view\.dtype"),
    "list_of_tensors": (lambda x: torch._foreach_add_([x, x], 1), "no functional form"),
    "a_name_that_python_reserves": (lambda x: x.random_(1, 9), r"aten\.random_\.from .* cannot be written"),
    "two_rows_at_one_place": (
        lambda x: x.index_put_((torch.tensor([1]),), x[:2] * 2),
        r"shape \[2, 4\] are written to",
    ),
    "draws_with_gaps": (lambda x: x[:, 1:3].normal_(), "writes into a view with gaps"),
}


@pytest.mark.parametrize(("write", "reason"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_has_no_functional_form_is_refused(write: Write, reason: str, calls: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=reason):
        capture(calls(write), (torch.randn(3, 4),))


def test_memory_outside_of_a_written_argument_is_refused(calls: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match="as_strided"):
        capture(calls(lambda x: x.as_strided((2, 2), (4, 1), 0).add_(1)), (torch.randn(6, 4)[2:5],))


# ---- random programs -----------------------------------------------------------------------------------------------

VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t[0],
    lambda t: t[-1:],
    lambda t: t[..., ::2],
    lambda t: t.transpose(0, -1),
    lambda t: t.unsqueeze(0),
    lambda t: t.squeeze(),
    lambda t: t.flatten(),
    lambda t: t.split(1, 0)[-1],
    lambda t: t.unbind(-1)[0],
    lambda t: t.diagonal(0, 0, -1) if t.dim() > 1 else t,
    lambda t: t.movedim(0, -1),
    lambda t: t.detach(),
]
STEPS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda t, other: t.add_(1),
    lambda t, other: t.mul_(other.sum()),
    lambda t, other: t.zero_(),
    lambda t, other: t.copy_(other.reshape(-1)[:1].clone()),
    lambda t, other: t.masked_fill_(t > 0.5, 0.25),
    lambda t, other: t.clamp_(-1, 1),
    lambda t, other: t.copy_(t.flip(0)),
    lambda t, other: torch.add(t, 2, out=t),
]

programs = st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=10)


def interpret(program: list[tuple[bool, int, int]], x: Tensor) -> list[Tensor]:
    """Each step makes a view of, or writes to, one of the tensors that there are."""
    tensors = [x, x * 2]
    for is_view, what, where in program:
        tensor = tensors[where % len(tensors)]
        if is_view and tensor.dim():
            tensors.append(VIEWS[what % len(VIEWS)](tensor))
        elif tensor.dim():
            STEPS[what % len(STEPS)](tensor, tensors[what % len(tensors)])
    return tensors


@settings(max_examples=100, deadline=None, derandomize=True)
@given(programs)
def test_random_programs_of_views_and_writes_are_eagers(
    same_function: Callable[..., GraphModule], program: list[tuple[bool, int, int]]
) -> None:
    x = torch.linspace(-2, 2, 24).view(2, 3, 4).clone()
    same_function(lambda x: interpret(program, x), x)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(programs)
def test_random_programs_agree_with_the_functional_form_of_torch(
    calls: Callable[..., Any], program: list[tuple[bool, int, int]]
) -> None:
    x = torch.linspace(-2, 2, 24).view(2, 3, 4).clone()

    def function(x: Tensor) -> list[Tensor]:
        return [t.clone() for t in interpret(program, x.clone())]

    ours = capture(calls(function), (x,))
    theirs = torch.func.functionalize(function)(x)
    with torch.no_grad():
        values = ours(x)
    assert len(values) == len(theirs)
    for mine, functional in zip(values, theirs, strict=True):
        assert torch.equal(mine, functional)
