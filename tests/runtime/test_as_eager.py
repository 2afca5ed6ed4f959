"""Calls whose outcome depends on memory, on conversions of numbers or on classes: as eager does, or by eager itself.

Each is run eager and twice fused, on copies; results, their layouts, what became of the inputs, and errors are held to
eager's. Where the graph cannot hold the call, one warning says so.
"""

from __future__ import annotations

import collections
import dataclasses
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import fuse
from fuse.check.oracle import check
from fuse.graph.structure.result_structure import named_parts
from fuse.runtime import making

Function = Callable[..., Any]


class Calls(nn.Module):
    """A function as a model."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def held_to_eager(function: Function, *inputs: Tensor) -> Any:
    """Assert that two fused calls are as eager's; returns ``last_run`` (None where eager raises)."""
    model = Calls(function)
    fused = fuse.compile(model)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expected = outcome(model, inputs)
        told.clear()
        for _ in range(2):
            assert_same(outcome(fused, inputs), expected)
    ours = [w for w in told if "runs eager" in str(w.message)]
    assert len(ours) <= 1, "more than one warning"
    if fused.last_run is not None and fused.compiled is None:
        assert ours, "ran eager without a word"
    return fused.last_run


def outcome(model: Any, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """What a call leaves behind, on copies of the inputs that lie in memory as they do."""
    copies = [_copied(t) for t in inputs]
    try:
        result = model(*copies)
    except Exception as error:
        return {"error": type(error), "text": str(error)}
    return named_parts([result, copies])


def _copied(tensor: Tensor) -> Tensor:
    memory = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        other = mine[name]
        assert type(other) is type(value), name
        if isinstance(value, Tensor):
            assert not isinstance(other, FakeTensor), name
            assert (other.dtype, other.shape, other.stride()) == (value.dtype, value.shape, value.stride()), name
            torch.testing.assert_close(other, value, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert other == value, name


X = torch.arange(24.0).reshape(4, 6) * 0.37 - 3
LARGE = torch.arange(48.0).reshape(8, 6) * 0.21 - 2
Z = torch.complex(X, X.flip(0))


# ---- as_strided ------------------------------------------------------------------------------------------------------

STRIDED: dict[str, Function] = {
    "of_a_temporary": lambda x: (x * 2).as_strided((2, 3), (6, 1), 4) + 1,
    "of_a_view_of_a_temporary": lambda x: (x * 2)[1:].as_strided((2, 3), (6, 1), 4) + 1,
    "from_where_a_view_begins": lambda x: (x * 2)[1:].as_strided((2, 3), (6, 1)) + 1,
    "of_a_transposed_temporary": lambda x: (x.t() * 2).as_strided((2, 3), (6, 1), 4) + 1,
    "of_as_strided": lambda x: (x * 2).as_strided((2, 3), (6, 1), 4).as_strided((2, 2), (2, 1), 3) + 1,
    "read_by_a_library": lambda x: (x * 2).as_strided((2, 3), (6, 1), 4).sort()[0],
    "of_what_a_library_made": lambda x: x.sort()[0].as_strided((2, 3), (6, 1), 4).sort()[0],
    "returned": lambda x: (x * 2).as_strided((2, 3), (6, 1), 4),
    "with_windows_that_overlap": lambda x: (x * 2).as_strided((4, 3), (2, 1), 1) * 3,
}
STRIDED_WRITES: dict[str, Function] = {
    "written": lambda y: y.as_strided((2, 3), (6, 1), 4).add_(1),
    "written_where_elements_overlap": lambda y: y.as_strided((3, 3), (1, 1)).add_(1),
    "of_which_a_row_is_written_that_overlaps_others": lambda y: y.as_strided((4, 3), (2, 1))[1].add_(1),
    "of_a_view_written": lambda y: y[2:].as_strided((2, 3), (6, 1), 4).add_(1),
}
STRIDED_INPUTS: dict[str, Function] = {
    "from_the_start_of_the_storage": lambda x: x.as_strided((2, 3), (6, 1), 0) + 1,
    "within": lambda x: x.as_strided((2, 3), (6, 1), 14) + 1,
    "from_where_the_input_begins": lambda x: x.as_strided((2, 3), (6, 1)) + 1,
    "beyond_the_input": lambda x: x[1:].as_strided((4, 6), (6, 1)) + 1,
    "written": lambda x: x.as_strided((2, 3), (6, 1), 14).mul_(2),
    "returned": lambda x: x.as_strided((2, 3), (6, 1), 4),
}


@pytest.mark.parametrize("name", STRIDED)
def test_as_strided_of_a_temporary_counts_from_its_start(name: str) -> None:
    assert held_to_eager(STRIDED[name], X).fallbacks == ()


@pytest.mark.parametrize("name", STRIDED_WRITES)
def test_a_write_through_as_strided_reaches_what_it_reaches_in_eager(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        STRIDED_WRITES[name](y)
        return y.sort()[0] + y

    held_to_eager(function, X)


@pytest.mark.parametrize("name", STRIDED_INPUTS)
def test_as_strided_of_an_input_is_right_wherever_it_lies_in_its_storage(name: str) -> None:
    fused = fuse.compile(Calls(STRIDED_INPUTS[name]))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for start in (2, 0, 4, 3):
            inputs = (LARGE[start : start + 4],)
            assert_same(outcome(fused, inputs), outcome(Calls(STRIDED_INPUTS[name]), inputs))


# ---- one memory, two dtypes ------------------------------------------------------------------------------------------

TWO_DTYPES: dict[str, Function] = {
    "real": lambda z: z.real,
    "imaginary": lambda z: z.imag,
    "real_and_imaginary": torch.view_as_real,
    "of_a_conjugate": lambda z: z.conj().imag,
    "a_conjugate": lambda z: z.conj(),
    "of_a_temporary": lambda z: (z * 2).real,
    "integers": lambda z: torch.view_as_real(z).view(torch.int32),
    "among_others": lambda z: (z.real.sum(), z.real),
}


@pytest.mark.parametrize("name", TWO_DTYPES)
def test_a_view_of_other_dtype_can_be_the_result(name: str) -> None:
    held_to_eager(TWO_DTYPES[name], Z)


def test_parts_of_complex_numbers_are_computed_with() -> None:
    assert held_to_eager(lambda z: z.real + 1, Z).fallbacks == ()


# ---- writes that overlap ---------------------------------------------------------------------------------------------

ROW = torch.linspace(-1, 1, 6).reshape(1, 6)
OVERLAPS: dict[str, tuple[Function, Tensor]] = {
    "an_expanded_input": (lambda x: x.add_(1), ROW.expand(4, 6)),
    "an_expanded_temporary": (lambda x: (x * 2).expand(4, 6).mul_(2), ROW),
    "the_next_rows": (lambda x: x[1:].add_(x[:-1]), X),
    "the_next_columns": (lambda x: x[:, 1:].add_(x[:, :-1]), X),
    "copied_one_row_down": (lambda x: x[1:].copy_(x[:-1]), X),
    "a_row_of_an_expanded_input": (lambda x: x[0].copy_(x.sum(0)), ROW.expand(4, 6)),
    "its_own_transpose": (lambda x: x.add_(x.t()), X[:, :4].contiguous()),
    "its_first_column": (lambda x: x.sub_(x[:, :1]), X),
    "into_out": (lambda x: torch.mul(x.view(-1)[1:], 2, out=x.view(-1)[:-1]), X),
    "indexed_by_its_own": (lambda x: x.scatter_(0, torch.zeros(1, 6, dtype=torch.int64), x), X),
}
APART: dict[str, Function] = {
    "halves": lambda x: x[:, :3].mul_(x[:, 3:]),
    "every_other": lambda x: x[:, ::2].add_(x[:, 1::2]),
    "rows": lambda x: x[2].add_(x[1]),
    "columns": lambda x: x[:, 2].copy_(x[:, 1]),
    "itself": lambda x: x.mul_(x),
    "a_column_of_another": lambda x: x.sub_((x * 1)[:, :1]),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_a_write_that_overlaps_what_is_read_does_what_eager_does(name: str) -> None:
    function, x = OVERLAPS[name]
    held_to_eager(function, x)
    held_to_eager(lambda x: (function(x * 1), x)[1], x)


@pytest.mark.parametrize("name", APART)
def test_parts_that_share_no_element_are_written_fused(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 1
        APART[name](y)
        return y

    assert held_to_eager(function, X).fallbacks == ()


# ---- numbers ---------------------------------------------------------------------------------------------------------

NUMBERS: dict[str, Function] = {
    "added": lambda x, k: x + k,
    "in_place": lambda x, k: (x * 1).mul_(k),
    "scaled": lambda x, k: torch.add(x, x, alpha=k),
    "subtracted_from": lambda x, k: k - x,
    "filled": lambda x, k: (x * 1).fill_(k),
    "full": lambda x, k: torch.full((3,), k, dtype=x.dtype),
    "masked": lambda x, k: x.masked_fill(x == 1, k),
    "chosen": lambda x, k: torch.where(x == 1, x, k),
    "bounded": lambda x, k: x.clamp(max=k),
    "padded": lambda x, k: nn.functional.pad(x, (1, 1), value=k),
    "divided": lambda x, k: x // k,
    "a_remainder": lambda x, k: x % k,
    "compared": lambda x, k: x > k,
    "stored": lambda x, k: torch.scalar_tensor(k, dtype=x.dtype),
    "scattered": lambda x, k: (x * 1).scatter_(0, FIRST, k),
    "filled_in_places": lambda x, k: (x * 1).index_fill_(0, FIRST, k),
    "on_the_diagonal": lambda x, k: torch.stack([x, x]).fill_diagonal_(k),
}
FIRST = torch.tensor([0, 2])
DTYPES = (torch.uint8, torch.int64, torch.bool, torch.float16)
EXTREMES = (256, 2**63, 1e39, 1.5, True)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_that_a_dtype_cannot_hold_does_what_eager_does(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2, 3]).to(dtype)
    for number in EXTREMES:
        held_to_eager(lambda x, k=number: NUMBERS[name](x, k), x)


@pytest.mark.parametrize("name", ["scattered", "filled_in_places", "on_the_diagonal"])
def test_some_writes_turn_a_number_into_the_dtype_that_they_find(name: str) -> None:
    for dtype, number in ((torch.bool, 1), (torch.bool, 0.5), (torch.int64, 1.5)):
        run = held_to_eager(lambda x, k=number: NUMBERS[name](x, k), torch.zeros(4, dtype=dtype))
        assert run.fallbacks == ()


# ---- what a library makes from memory that is used again ----------------------------------------------------------

COPIES_OF_STORAGE: dict[str, Function] = {
    "a_slice": lambda z: torch.slice_scatter(z, z[:2], 0, 1, 3),
    "a_row": lambda z: torch.select_scatter(z, z[0], 0, 2),
    "strided": lambda z: torch.as_strided_scatter(z, z[0], (6,), (1,), 0),
}


@pytest.mark.parametrize("name", COPIES_OF_STORAGE)
def test_what_a_scatter_copies_is_its_operand_and_no_more(name: str) -> None:
    def function(z: Tensor) -> tuple[Tensor, Tensor]:
        before = (z * 2).exp()
        z = (before + 1).exp()
        return COPIES_OF_STORAGE[name](z), before.sum()

    z = torch.complex(X / 9, X / 7)
    fused = fuse.compile(Calls(function))
    for _ in range(2):
        scattered = fused(z)[0]
        assert (scattered.storage_offset(), scattered.untyped_storage().nbytes()) == (0, z.numel() * 8)
    held_to_eager(function, z)


# ---- conversions there and back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("integer", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("real", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_an_integer_on_the_way_loses_what_it_cannot_hold(integer: torch.dtype, real: torch.dtype) -> None:
    x = torch.tensor([-0.5, 300.0, -300.7, 70000.0, 1.5, -0.0, 127.9, 16777216.0] * 5).to(real)
    run = held_to_eager(lambda x: (x.to(integer).to(real), x.to(integer).rsqrt(), x.to(integer).float().abs()), x)
    assert run.fallbacks == ()


@pytest.mark.parametrize("read", [True, False], ids=["read", "not_read"])
@pytest.mark.parametrize("by", ["tensor", "number", "tensor_without_zeros"])
def test_an_integer_division_by_zero_raises_where_nobody_reads_it(read: bool, by: str) -> None:
    def function(x: Tensor) -> Tensor:
        whole = x.long()
        divided = whole // {"tensor": whole * 0, "number": 0, "tensor_without_zeros": whole * 0 + 2}[by]
        return divided if read else x * 2

    held_to_eager(function, X)


SCALARS: dict[str, Function] = {
    "flipped": lambda x: x.flip(0) * 2,
    "flipped_onto_itself": lambda x: x.copy_(x.flip(0)),
    "gathered": lambda x: x.gather(0, torch.zeros((), dtype=torch.int64)) * 2,
    "selected": lambda x: x.index_select(0, torch.tensor([0])) * 2,
    "stacked": lambda x: torch.stack([x, x * 2], -1) * 2,
    "accumulated": lambda x: x.cumsum(0) * 2,
    "transposed": lambda x: x.transpose(0, -1) * 2,
    "softened": lambda x: x.softmax(0) + x.amax(0) + x.argmax(0),
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_scalar_has_a_first_dimension_as_in_eager(name: str) -> None:
    run = held_to_eager(SCALARS[name], torch.tensor(1.5))
    assert all("internal error" not in fallback.reason for fallback in run.fallbacks)


# ---- operators without code for a dtype ------------------------------------------------------------------------------

NOT_THERE: dict[str, Function] = {
    "gelu_of_integers": lambda x: nn.functional.gelu(x.int()),
    "fraction_of_integers": lambda x: x.long().frac(),
    "bits_of_floats": lambda x: torch.bitwise_and(x, x),
    "absolute_of_bools": lambda x: x.bool().abs(),
    "deviation_of_integers": lambda x: x.int().std(0),
    "mish_of_bools": lambda x: nn.functional.mish(x > 0),
    "softmax_of_integers": lambda x: torch.softmax(x.int(), 0),
    "position_among_bools": lambda x: (x > 0).argmax(0),
    "largest_of_none": lambda x: x[:0].max(),
    "position_in_none": lambda x: x[:0].argmin(),
    "positions_in_none": lambda x: x[:0].max(0).indices,
    "shifted_floats": lambda x: torch.bitwise_left_shift(x, x),
}


WIDE = torch.randn(8, 8, dtype=torch.float64)
MIXED: dict[str, Function] = {
    "linear": lambda x: nn.functional.linear(x.expand(8, 8), WIDE).relu(),
    "bias": lambda x: nn.functional.linear(x.expand(8, 8), WIDE.float(), WIDE[0]).relu(),
    "added": lambda x: torch.addmm(WIDE, x.expand(8, 8), WIDE.float()).relu(),
    "batch": lambda x: torch.bmm(x.expand(2, 8, 8), WIDE.expand(2, 8, 8)).relu(),
    "vector": lambda x: torch.mv(WIDE, x).relu(),
    "convolution": lambda x: nn.functional.conv1d(x.view(1, 1, 8), WIDE[:1, None, :3]).relu(),
    "bias of a convolution": lambda x: nn.functional.conv1d(x.view(1, 1, 8), WIDE[:1, None, :3].float(), WIDE[0, :1]),
    "loop": lambda x: _loop(x.expand(6, 2, 8), WIDE),
}
"""Products of ``x``, eight numbers, by others of another dtype."""


def _loop(x: Tensor, weight: Tensor) -> Tensor:
    h = torch.zeros(2, 8)
    for step in x:
        h = torch.tanh(step + torch.mm(h, weight))
    return h


@pytest.mark.parametrize("name", MIXED)
def test_products_of_two_dtypes_raise(name: str) -> None:
    assert held_to_eager(MIXED[name], torch.randn(8)) is None


@pytest.mark.parametrize("name", NOT_THERE)
@pytest.mark.parametrize("read", [True, False], ids=["read", "not_read"])
def test_what_eager_has_no_code_for_raises(name: str, read: bool) -> None:
    function = NOT_THERE[name]
    assert held_to_eager(lambda x: (function(x), x + 1)[0 if read else 1], X) is None


# ---- classes of results ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Answer:
    scores: Tensor
    twice: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.scores * 2


class Pair(NamedTuple):
    first: Tensor
    second: int


class OwnDict(dict[str, Any]):
    pass


class OwnList(list[Any]):
    pass


class Holder:
    def __init__(self, held: Tensor) -> None:
        self.held = held


RESULTS: dict[str, Function] = {
    "dataclass": lambda x: Answer(x * 2),
    "nested": lambda x: {"pair": [Answer(x * 2), Pair(x - 1, 3)]},
    "named_tuple": lambda x: Pair(x * 2, 1),
    "ordered": lambda x: collections.OrderedDict(b=x * 2, a=x),
    "with_default": lambda x: collections.defaultdict(list, a=x * 2),
    "queue": lambda x: collections.deque([x * 2]),
    "own_dict": lambda x: OwnDict(a=x * 2),
    "own_dict_inside": lambda x: (x, OwnDict(a=[OwnDict(b=x * 2)])),
    "own_list": lambda x: OwnList([x * 2]),
    "user_dict": lambda x: collections.UserDict(a=x * 2),
    "object": lambda x: Holder(x * 2),
    "namespace": lambda x: types.SimpleNamespace(a=x * 2),
    "values": lambda x: {"a": x * 2}.values(),
    "torch_structure": lambda x: (x * 2).max(0),
    "plain": lambda x: (None, x.dtype, x.shape, "a", slice(1, None)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_of_eagers_class_and_holds_real_tensors(name: str) -> None:
    held_to_eager(RESULTS[name], X)


@pytest.mark.filterwarnings("ignore:Calls runs eager")
@pytest.mark.parametrize("name", RESULTS)
def test_check_looks_into_results_of_every_class(name: str) -> None:
    report = check(Calls(RESULTS[name]), (X,))
    assert report.passed, str(report)


def test_a_function_is_not_returned_with_what_it_holds() -> None:
    fused = fuse.compile(Calls(lambda x: lambda: x * 2))
    with torch.no_grad(), pytest.warns(UserWarning, match="the result holds a function"):
        assert torch.equal(fused(X)(), X * 2)


def test_check_sees_a_wrong_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "reconstruction", lambda signature: lambda values, inputs: {"a": values[0]})
    report = check(Calls(lambda x: collections.OrderedDict(a=x * 2)), (X,))
    assert report.problems == ("the result is made of other classes than eager's",)


def by_grad_mode(x: Tensor) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x * 3


def of_a_new_tensor(x: Tensor) -> Tensor:
    return x * torch.ones(4, requires_grad=torch.is_grad_enabled())


def slope(x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.clone().requires_grad_()
        return torch.autograd.grad((y**3).sum(), y)[0]


HIDDEN = torch.full((4,), 3.0, requires_grad=True)


def of_a_global(x: Tensor) -> Tensor:
    return x * HIDDEN + (1 if torch.is_grad_enabled() else 2)


@pytest.mark.parametrize("grad_mode", [True, False])
@pytest.mark.parametrize("function", [by_grad_mode, of_a_new_tensor, slope, of_a_global])
def test_forward_finds_the_grad_mode_of_the_caller(function: Function, grad_mode: bool) -> None:
    fused, x = fuse.compile(Calls(function)), torch.randn(3, 4)
    with torch.set_grad_enabled(grad_mode):
        for _ in range(2):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                result = fused(x)
            want = function(x)
            assert torch.equal(result.detach(), want.detach())
            assert result.requires_grad == want.requires_grad
            assert bool(fused.last_run.fallbacks) == (function is of_a_new_tensor and grad_mode), told
            HIDDEN.grad = None
            if result.requires_grad and function is of_a_global:
                result.sum().backward()
                assert torch.allclose(HIDDEN.grad, x.sum(0))
