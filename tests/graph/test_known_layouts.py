"""What is worked out without asking torch's fake mode is what eager makes: shape, strides, dtype, place and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fuse.graph.fakes.fake_mode import FakeMode
from fuse.graph.fakes.known_layouts import _RULES, known

aten = torch.ops.aten


@st.composite
def laid_out(draw: st.DrawFn, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape, perhaps transposed, with gaps, offset, or repeated along some dimensions."""
    order = draw(st.permutations(range(len(shape))))
    gaps = draw(st.lists(st.sampled_from([1, 1, 2]), min_size=len(shape), max_size=len(shape)))
    repeated = draw(st.lists(st.sampled_from([False, False, True]), min_size=len(shape), max_size=len(shape)))
    whole = torch.zeros([max(shape[dim] * gaps[dim], 1) for dim in order], dtype=dtype)
    inverse = [order.index(dim) for dim in range(len(shape))]
    part = whole.permute(inverse)
    for dim, gap in enumerate(gaps):
        part = part[(slice(None),) * dim + (slice(0, shape[dim] * gap, gap),)]
    for dim, is_repeated in enumerate(repeated):
        if is_repeated and shape[dim] > 1:
            part = part.narrow(dim, 0, 1).expand(shape)
    return part


shapes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])


def same(ours: Any, eager: Any) -> None:
    if isinstance(eager, (tuple, list)):
        assert type(ours) is type(eager)
        assert len(ours) == len(eager)
        for one, other in zip(ours, eager, strict=True):
            same(one, other)
        return
    assert isinstance(ours, FakeTensor)
    facts = [(t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.device) for t in (ours, eager)]
    assert facts[0] == facts[1]
    assert ours.untyped_storage().nbytes() == eager.untyped_storage().nbytes()


def compare(op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> bool:
    """Whether the operator was answered; what is answered must be eager's."""
    mode, kwargs = FakeMode(), kwargs or {}
    twins = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, list(args))
    ours = known(mode, op, tuple(twins), kwargs)
    if ours is NotImplemented:
        return False
    same(ours, op(*args, **kwargs))
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is not None and isinstance(ours, Tensor):
        shares = ours.untyped_storage()._cdata == twins[0].untyped_storage()._cdata
        eager = op(*args, **kwargs)
        assert shares == (eager.untyped_storage()._cdata == first.untyped_storage()._cdata)
    return True


UNARY = [
    getattr(aten, name)
    for name in ("abs", "exp", "gelu", "log", "neg", "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sqrt", "tanh")
]
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_elementwise_results_lie_as_in_eager(data: st.DataObject) -> None:
    shape, dtype = data.draw(shapes), data.draw(dtypes)
    x = data.draw(laid_out(shape, dtype))
    if dtype is not torch.int64:
        assert compare(data.draw(st.sampled_from(UNARY)).default, [x]) == (0 not in shape)
    narrow = tuple(1 if data.draw(st.booleans()) else size for size in shape)[data.draw(st.integers(0, len(shape))) :]
    y = data.draw(laid_out(narrow, data.draw(st.sampled_from([dtype, torch.float32]))))
    compare(data.draw(st.sampled_from(BINARY)), data.draw(st.permutations([x, y])))
    compare(data.draw(st.sampled_from(BINARY[:4])), [x, data.draw(st.sampled_from([2, 0.5, True]))])
    compare(aten.rsub.Scalar, [x, 1])


VIEWS: dict[str, Callable[[st.DataObject, Tensor], tuple[Any, list[Any]]]] = {
    "select": lambda d, x: (aten.select.int, [d.draw(st.integers(-x.dim(), x.dim())), d.draw(st.integers(-4, 4))]),
    "slice": lambda d, x: (
        aten.slice.Tensor,
        [d.draw(st.integers(-x.dim(), x.dim() - 1)), *(d.draw(st.none() | st.integers(-5, 5)) for _ in "ab")],
    ),
    "permute": lambda d, x: (aten.permute.default, [list(d.draw(st.permutations(range(x.dim()))))]),
    "transpose": lambda d, x: (aten.transpose.int, [0, d.draw(st.integers(-x.dim(), x.dim()))]),
    "expand": lambda d, x: (aten.expand.default, [[d.draw(st.integers(1, 3)), *([-1] * x.dim())]]),
    "split": lambda d, x: (aten.split.Tensor, [d.draw(st.integers(1, 3)), d.draw(st.integers(0, x.dim() - 1))]),
    "unbind": lambda d, x: (aten.unbind.int, [d.draw(st.integers(0, x.dim() - 1))]),
    "unsqueeze": lambda d, x: (aten.unsqueeze.default, [d.draw(st.integers(-x.dim() - 1, x.dim()))]),
    "squeeze": lambda d, x: (aten.squeeze.dim, [d.draw(st.integers(-x.dim(), x.dim() - 1))]),
    "detach": lambda d, x: (aten.detach.default, []),
}


@pytest.mark.parametrize("name", VIEWS)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_views_are_views_of_the_same_memory(name: str, data: st.DataObject) -> None:
    x = data.draw(laid_out(data.draw(shapes), data.draw(dtypes)))
    op, args = VIEWS[name](data, x)
    try:
        op(x, *args)
    except (RuntimeError, IndexError):
        with FakeMode() as mode, pytest.raises((RuntimeError, IndexError)):
            op(mode.from_tensor(x), *args)
    else:
        assert compare(op, [x, *args])


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_products_and_stacks_are_contiguous_as_in_eager(data: st.DataObject) -> None:
    rows, inner, columns = (data.draw(st.integers(0, 4)) for _ in range(3))
    a, b = data.draw(laid_out((rows, inner), torch.float32)), data.draw(laid_out((inner, columns), torch.float32))
    assert compare(aten.mm.default, [a, b])
    bias = data.draw(st.sampled_from([(columns,), (1,), (rows, columns), (rows, 1), ()]))
    assert compare(aten.addmm.default, [data.draw(laid_out(bias, torch.float32)), a, b])
    assert not compare(aten.mm.default, [a, b.double()])
    batch, other = (data.draw(st.integers(0, 2)) for _ in range(2))
    left, right = data.draw(laid_out((batch, rows, inner), torch.float32)), torch.zeros(other, inner, columns)
    if batch == other:
        assert compare(aten.bmm.default, [left, right])
    shape = data.draw(shapes)
    parts = [torch.zeros(shape) for _ in range(3)]
    assert compare(aten.stack.default, [parts, data.draw(st.integers(-len(shape) - 1, len(shape)))])
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    other_shape = list(shape)
    other_shape[dim] = data.draw(st.integers(0, 4))
    parts.append(data.draw(laid_out(other_shape, data.draw(st.sampled_from([torch.float32, torch.float64])))))
    known_here = parts[-1].dtype is torch.float32 and len(shape) < 4
    assert compare(aten.cat.default, [parts, dim]) == known_here


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_norms_softmax_copies_and_reshapes_lie_as_in_eager(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    x = data.draw(laid_out(shape, data.draw(dtypes)))
    compare(aten.clone.default, [x])
    assert compare(aten.zero.default, [x]) == (0 not in shape)
    options = data.draw(st.sampled_from([{}, {"dtype": torch.float64}, {"device": "cpu", "pin_memory": False}]))
    assert compare(aten.zeros_like.default, [x], options) == (0 not in shape)
    assert compare(aten.full_like.default, [x, 2], options) == (0 not in shape)
    assert not compare(aten.ones_like.default, [x], {"memory_format": torch.contiguous_format})
    size = data.draw(shapes)
    assert compare(aten.new_zeros.default, [x, size], options)
    assert compare(aten.new_full.default, [x, size, 2], options)
    if x.is_floating_point():
        compare(data.draw(st.sampled_from([aten._softmax, aten._log_softmax])).default, [x, len(shape) - 1, False])
        normed = list(shape[data.draw(st.integers(0, len(shape) - 1)) :])
        weight = data.draw(st.sampled_from([None, torch.zeros(normed), torch.zeros(normed, dtype=x.dtype)]))
        bias = None if weight is None else torch.zeros_like(weight)
        if x.dtype is torch.bfloat16 or weight is None or weight.dtype is x.dtype:
            compare(aten.native_layer_norm.default, [x, normed, weight, bias, 1e-5])
    if x.is_contiguous():
        assert compare(aten.view.default, [x, [x.numel()]])


def test_zeros_like_one_element_have_its_strides() -> None:
    assert compare(aten.zero.default, [torch.zeros(2)[::2]])


@pytest.mark.parametrize("other", [(2, 3), (3,), (2, 1), (4, 2, 3)])
def test_what_is_written_in_place_keeps_its_shape(other: tuple[int, ...]) -> None:
    with FakeMode() as mode:
        x, y = torch.empty(2, 3), torch.empty(other)
        answer = known(mode, aten.add_.Tensor, (x, y), {})
        assert (answer is x) == (len(other) < 3)


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.int64])
def test_factories_take_the_default_dtype_and_their_arguments(dtype: torch.dtype | None) -> None:
    assert compare(aten.empty.memory_format, [[2, 3, 4, 5]], {"memory_format": torch.channels_last, "dtype": dtype})
    assert compare(aten.empty_strided.default, [[2, 3], [1, 2]], {"dtype": dtype})
    assert compare(aten.zeros.default, [[2, 0]], {"dtype": dtype, "device": torch.device("cpu")})
    assert compare(aten.full.default, [[2, 3], 0.5], {"dtype": dtype, "pin_memory": False}) == (dtype is not None)
    assert not compare(aten.zeros.default, [[2, 3]], {"layout": torch.sparse_coo})
    assert not compare(aten.empty.memory_format, [[2, 3]], {"device": torch.device("meta")})


def test_values_are_written_into_the_tensor_itself() -> None:
    with FakeMode():
        x = torch.empty(2, 3)
        assert x.uniform_() is x
        assert x.normal_(0, 1).zero_().fill_(2.0) is x


def test_errors_are_torchs_own() -> None:
    with FakeMode():
        x, y = torch.empty(2, 3), torch.empty(4, 5)
        with pytest.raises(RuntimeError, match=r"must match|broadcast"):
            x + y
        with pytest.raises(RuntimeError, match=r"2x3|a and b must have same reduction dim|size"):
            x @ y


def test_every_rule_is_one_of_an_operator_that_makes_no_choice_by_values() -> None:
    assert all(torch.Tag.data_dependent_output not in op.tags for op in _RULES)
