"""What is remembered of fake results is what FakeTensorMode would have answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fuse.graph.fakes.fake_mode import FakeMode
from fuse.graph.fakes.fake_operators import FakeRunner, unlogged

aten = torch.ops.aten


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as fake_mode:
        yield fake_mode


def facts(result: Any) -> list[tuple[Any, ...]]:
    return [
        (t.dtype, t.shape, t.stride(), t.storage_offset(), t.device, t.untyped_storage().nbytes())
        for t in pytree.tree_leaves(result)
    ]


def transposed() -> Tensor:
    return torch.empty(8, 4).t()


CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "elementwise": (aten.add.Tensor, lambda: (torch.empty(4, 8), torch.empty(8))),
    "keeps_strides": (aten.tanh.default, lambda: (transposed(),)),
    "promotes": (aten.add.Tensor, lambda: (torch.empty(4, dtype=torch.int64), 1.5)),
    "integer_division": (aten.div.Tensor, lambda: (torch.empty(4, dtype=torch.int64), 2)),
    "product": (aten.mm.default, lambda: (transposed(), torch.empty(8, 4))),
    "row": (aten.select.int, lambda: (torch.empty(4, 8), 0, 2)),
    "view_of_a_view": (aten.slice.Tensor, lambda: (torch.empty(6, 8)[2:], 1, 1, 5)),
    "parts": (aten.split.Tensor, lambda: (torch.empty(4, 8), 3, 1)),
    "several_results": (aten.max.dim, lambda: (torch.empty(4, 8), 1)),
    "list_of_tensors": (aten.cat.default, lambda: ([torch.empty(4, 8), torch.empty(2, 8)],)),
    "in_place": (aten.add_.Tensor, lambda: (torch.empty(4, 8), 1)),
}


@pytest.mark.parametrize(("op", "arguments"), CALLS.values(), ids=CALLS.keys())
def test_the_second_answer_is_torchs(op: Any, arguments: Callable[[], tuple[Any, ...]], mode: FakeTensorMode) -> None:
    runner = FakeRunner(mode)
    runner.run(op, arguments(), {})
    args = arguments()
    result, expected = runner.run(op, args, {}), op(*arguments())
    assert type(result) is type(expected)
    assert facts(result) == facts(expected)
    first = args[0][0] if isinstance(args[0], list) else args[0]
    assert sharing(result, first) == sharing(op(*args), first)


def sharing(result: Any, argument: Tensor) -> list[bool]:
    storage = argument.untyped_storage()._cdata
    return [tensor.untyped_storage()._cdata == storage for tensor in pytree.tree_leaves(result)]


def test_an_operator_in_place_returns_its_argument(mode: FakeTensorMode) -> None:
    runner, x = FakeRunner(mode), torch.empty(3)
    assert all(runner.run(aten.mul_.Tensor, (x, 2), {}) is x for _ in range(3))


def test_numbers_of_other_types_are_other_calls(mode: FakeTensorMode) -> None:
    runner, x = FakeRunner(mode), torch.empty(3, dtype=torch.int64)
    dtypes = [runner.run(aten.add.Tensor, (x, number), {}).dtype for number in (1, 1.0, True, 1)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]


def test_every_result_is_an_object_and_a_memory_of_its_own(mode: FakeTensorMode) -> None:
    runner, x = FakeRunner(mode), torch.empty(3)
    results = [runner.run(aten.neg.default, (x,), {}) for _ in range(3)]
    assert len({id(r) for r in results}) == 3
    assert len({r.untyped_storage()._cdata for r in results}) == 3


def test_a_call_that_fails_fails_every_time(mode: FakeTensorMode) -> None:
    runner = FakeRunner(mode)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            runner.run(aten.mm.default, (torch.empty(2, 3), torch.empty(2, 3)), {})


def test_a_tensor_that_changed_its_shape_is_looked_at_again(mode: FakeTensorMode) -> None:
    runner, x = FakeRunner(mode), torch.empty(3)
    runner.run(aten.neg.default, (x,), {})
    runner.forget(x)
    x.unsqueeze_(0)
    assert runner.run(aten.neg.default, (x,), {}).shape == (1, 3)


PARTS = {
    "row": (aten.select.int, [(0, 2), (0, -1), (1, 7), (-1, 0), (-2, -4)]),
    "slice": (
        aten.slice.Tensor,
        [(0, 1, 3), (1, -3, 9223372036854775807), (1, 1, 8, 3), (0,), (), (1, 6, 2), (0, None, 2)],
    ),
}


@pytest.mark.parametrize(("op", "places"), PARTS.values(), ids=PARTS.keys())
def test_what_a_step_reads_is_what_torch_reads(op: Any, places: list[tuple[Any, ...]], mode: FakeTensorMode) -> None:
    runner = FakeRunner(mode)
    for base in (torch.empty(4, 8), transposed(), torch.empty(6, 16)[2:, ::2]):
        for place in places:
            with torch.no_grad():
                part, expected = runner.run(op, (base, *place), {}), op(base, *place)
            assert facts(part) == facts(expected)
            assert sharing(part, base) == [True]


@pytest.mark.parametrize(
    ("op", "place"), [(aten.select.int, (0, 4)), (aten.select.int, (2, 0)), (aten.slice.Tensor, (3,))]
)
def test_a_place_that_does_not_exist_is_torchs_error(op: Any, place: tuple[int, ...]) -> None:
    with FakeMode() as mode, pytest.raises(IndexError), torch.no_grad():
        FakeRunner(mode).run(op, (torch.empty(4, 8), *place), {})


def test_where_an_operand_begins_says_nothing_of_what_is_computed(mode: FakeTensorMode) -> None:
    runner, whole = FakeRunner(mode), torch.empty(6, 8)
    for op, args in (
        (aten.add.Tensor, lambda x: (x, x)),
        (aten.sum.dim_IntList, lambda x: (x, [0])),
        (aten.mm.default, lambda x: (x, x.t())),
    ):
        for place in (whole[:2], whole[2:4], whole[4:]):
            assert facts(runner.run(op, args(place), {})) == facts(op(*args(place)))


def test_gradients_are_recorded_where_they_are_on(mode: FakeTensorMode) -> None:
    runner, weight = FakeRunner(mode), torch.empty(4, 8, requires_grad=True)
    with torch.no_grad():
        assert not runner.run(aten.tanh.default, (weight,), {}).requires_grad
        assert not runner.run(aten.select.int, (weight, 0, 0), {}).requires_grad
    assert runner.run(aten.tanh.default, (weight,), {}).requires_grad
    assert runner.run(aten.select.int, (weight, 0, 0), {}).requires_grad


def test_torchs_log_is_as_before_once_overlapping_contexts_end() -> None:
    """As in two threads that capture: the first context ends before the second."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    first, second = unlogged(), unlogged()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logger.disabled
    second.__exit__(None, None, None)
    assert not logger.disabled
