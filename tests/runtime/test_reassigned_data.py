"""Models that change their weights in ``forward``, by ``w.data = ...`` or writes that autograd does not see: a compiled
call leaves the state that eager leaves, and gradients read the tensors that eager's read."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check

Forward = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """Parameters ``w`` and ``v`` need gradients, ``t`` does not; ``mean`` is a buffer."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.function = forward
        self.w = nn.Parameter(torch.randn(4, 4))
        self.v = nn.Parameter(torch.randn(4, 4))
        self.t = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("mean", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def moving_average(m, x):
    m.t.data = m.t.data * 0.9 + m.w.data * 0.1
    return (torch.tanh(x @ m.w) - x @ m.t).square()


def moving_average_of_a_parameter(m, x):
    """The average is attached to the graph, and assigned all the same."""
    m.t.data = m.t * 0.9 + m.w * 0.1
    return torch.tanh(x @ m.w) * torch.tanh(x @ m.t)


def used_before_and_after(m, x):
    before = torch.tanh(x @ m.w)
    m.w.data = m.w.data * 0.5
    return before + torch.sin(x @ m.w)


def read_by_gradients(m, x):
    """The gradient of x @ t reads t, which autograd saved before t got other data."""
    y = torch.tanh(x @ m.v) @ m.t
    m.t.data = m.t.data * 0.5
    return y * (x @ m.w)


def spectral(m, x):
    u, v = m.mean, m.t
    for _ in range(2):
        v.data = F.normalize(m.w.detach().t() @ u.data)
        u.data = F.normalize(m.w.detach() @ v.data)
    return x @ (m.w / (u * (m.w @ v)).sum())


def twice_then_in_place(m, x):
    m.t.data = m.t.data + 1
    kept = m.t.data
    m.t.data = kept * 0.5
    m.t.data.mul_(0.5)
    kept.zero_()
    return x @ m.t + x @ m.w, kept


def clamped(m, x):
    m.w.data.clamp_(min=0)
    m.v.data = m.v.data.clamp(min=0)
    return torch.tanh(x @ m.w) @ m.v


def normalised(m, x):
    with torch.no_grad():
        m.w.copy_(F.normalize(m.w))
    return torch.tanh(x @ m.w)


def scaled_twice(m, x):
    """Each call changes the weights that the gradient of an earlier call reads."""
    m.w.data.mul_(0.5)
    m.mean.data.mul_(0.5)
    return torch.tanh(x @ m.w) @ m.w * m.mean[: len(x)]


def a_view_of_itself(m, x):
    m.t.data = m.t.data.t()
    m.mean.data = m.mean.data.flip(0)[1:]
    if len(m.mean) == 1:
        m.mean.data = torch.ones(4, 4)
    return x @ m.t + m.w.sum() * m.mean.sum()


def the_same(m, x):
    m.w.data = m.w.data
    m.t.data = m.t
    return x @ m.w @ m.t


def returned(m, x):
    old = m.t.data
    m.t.data = m.t.data + x.sum()
    return x @ m.w, m.t, old, m.t.data, m.t[1:]


def of_an_argument(m, x):
    y = x @ m.w
    x.data = torch.tanh(x.data)
    return y + x @ m.v


def to_another_module(m, x):
    for target, online in zip((m.t, m.mean), (m.w, m.v), strict=True):
        target.data = online.data.clone()
    return (x @ m.w) * (x @ m.t) + m.mean.sum()


def exchanged_for_a_while(m, x):
    for tensor in (m.t, x):
        own, tensor.data = tensor.data, torch.ones_like(tensor)
        x = x @ tensor if tensor is m.t else x * 2
        tensor.data = own
    return x @ m.w


def shared_from_now_on(m, x):
    m.t.data = m.w.data
    return torch.tanh(x @ m.w) @ m.t


def a_view_read_by_gradients(m, x):
    """Autograd saved a view, which keeps the old memory."""
    y = (x @ m.w) * m.t[0] * m.mean.view(16)[4:8]
    m.t.data = m.t.data + 1
    m.mean.data = m.mean.data * 0.5
    return y


FUSED = [
    exchanged_for_a_while,
    shared_from_now_on,
    a_view_read_by_gradients,
    moving_average,
    moving_average_of_a_parameter,
    used_before_and_after,
    read_by_gradients,
    spectral,
    twice_then_in_place,
    clamped,
    scaled_twice,
    the_same,
    returned,
    of_an_argument,
    to_another_module,
]


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def facts(model: nn.Module, more: Sequence[Any] = ()) -> list[Any]:
    """Everything about the tensors of a model that a caller can tell; identity is compared by position."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = [*named.values(), *(one for one in more if isinstance(one, Tensor))]
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [
        list(named),
        list(model.state_dict()),
        [[i for i, other in enumerate(tensors) if other is one] for one in tensors],
        [[i for i, other in enumerate(storages) if other == one] for one in storages],
        [
            (
                type(one),
                one.requires_grad,
                one.is_leaf,
                one.shape,
                one.stride(),
                one.storage_offset(),
                one.is_inference(),
            )
            for one in tensors
        ],
        [None if one.is_inference() else one._version for one in named.values()],
        [one.detach().clone() for one in tensors],
        [None if one.grad is None or not one.is_leaf else one.grad.clone() for one in named.values()],
    ]


def assert_same(some: Any, others: Any) -> None:
    if isinstance(some, Tensor):
        torch.testing.assert_close(some, others, rtol=1e-4, atol=1e-5)
    elif isinstance(some, (list, tuple)) and not isinstance(some, torch.Size):
        assert len(some) == len(others)
        for one, other in zip(some, others, strict=True):
            assert_same(one, other)
    else:
        assert some == others


def trained(model: nn.Module, call: nn.Module, forwards: int = 1, steps: int = 4) -> list[Any]:
    """Facts after each step of training; a step calls the model ``forwards`` times before it takes gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held = [*model.parameters(), *model.buffers()]
    alias, found = [one.data for one in held], []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        results = [call(torch.randn(3, 4, dtype=model.w.dtype)) for _ in range(forwards)]
        found.append(facts(model, [*held, *alias, *(results[-1] if isinstance(results[-1], tuple) else ())]))
        sum(first(result).square().mean() for result in results).backward()
        found.append(facts(model))
        optimizer.step()
        found.append([state["momentum_buffer"].clone() for state in optimizer.state.values()])
    return found


def both(
    function: Forward, run: Callable[..., list[Any]], dtype: torch.dtype = torch.float32, **how: Any
) -> tuple[list[Any], list[Any], Any]:
    torch.manual_seed(7)
    made = Model(function).to(dtype)
    model, eager = copy.deepcopy(made), copy.deepcopy(made)
    wanted = run(eager, eager, **how)
    fused = fuse.compile(model)
    return wanted, run(model, fused, **how), fused


@pytest.mark.sampled
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("function", FUSED)
def test_training_is_fused_and_leaves_eagers_state(function, forwards):
    wanted, got, fused = both(function, trained, forwards=forwards)
    assert_same(got, wanted)
    assert not fused.last_run.fallbacks
    assert not fused.last_run.backward.fallbacks


def called(model: nn.Module, call: nn.Module, modes: Sequence[Callable[[], Any]]) -> list[Any]:
    found, held = [], [*model.parameters(), *model.buffers()]
    for step, mode in enumerate(modes):
        torch.manual_seed(step)
        with mode():
            result = call(torch.randn(3, 4))
            found.append(facts(model, [*held, *(result if isinstance(result, tuple) else (result,))]))
    return found


MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.parametrize("function", [moving_average, clamped, normalised, a_view_of_itself, returned, the_same])
def test_modes_may_change_from_call_to_call(function):
    wanted, got, _ = both(function, called, modes=[torch.no_grad] * 3 + MODES)
    assert_same(got, wanted)


def test_data_of_inference_mode_is_fused_under_autograd():
    wanted, got, fused = both(moving_average, called, modes=[torch.no_grad, torch.inference_mode, torch.enable_grad])
    assert_same(got, wanted)
    assert not fused.last_run.fallbacks


@pytest.mark.parametrize("function", [*FUSED, normalised, a_view_of_itself])
def test_inference_is_fused(function):
    wanted, got, fused = both(function, called, modes=[torch.no_grad] * 5)
    assert_same(got, wanted)
    assert not fused.last_run.fallbacks


def test_a_write_that_autograd_sees_is_fused_too():
    wanted, got, fused = both(normalised, trained)
    assert_same(got, wanted)
    assert not fused.last_run.fallbacks


def test_a_gradient_raises_if_a_later_call_wrote_what_it_reads():
    for call in (model := Model(normalised), fuse.compile(model)):
        for _ in range(2):
            loss = call(torch.randn(3, 4, requires_grad=True)).sum()
            call(torch.randn(3, 4))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
    assert not call.last_run.fallbacks


def test_a_gradient_reads_data_in_another_layout():
    def run(model: nn.Module, call: nn.Module) -> list[Any]:
        loss = call(torch.ones(3, 4)).sum()
        model.v.data = torch.arange(16.0).view(4, 4).t()
        loss.backward()
        return facts(model)

    wanted, got, fused = both(clamped, run)
    assert_same(got, wanted)
    assert not fused.last_run.fallbacks
    assert fused.last_run.backward.fallbacks  # op by op, on what the tensor holds now


# ---- near misses -----------------------------------------------------------------------------------------------------


def another_dtype(m, x):
    m.t.data = (m.t.data * 0.5).double() if m.t.dtype is torch.float32 else (m.t.data * 0.5).float()
    return x @ m.w + m.t.sum()


def another_shape_of_a_leaf(m, x):
    m.w.data = torch.cat([m.w.data, m.w.data[:1]])
    return x @ m.v + m.w.detach().sum()


def of_a_local_tensor(m, x):
    y = x @ m.w
    y.data = y * 2
    return y.sum()


def of_a_part(m, x):
    part = m.w[1:]
    part.data = part.data * 2
    return x @ m.w + part.sum()


@pytest.mark.parametrize(
    "function",
    [another_dtype, another_shape_of_a_leaf, of_a_local_tensor, of_a_part],
)
@pytest.mark.parametrize("forwards", [1, 2])
def test_near_misses_run_eager(function, forwards):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, got, fused = both(function, trained, forwards=forwards)
    assert_same(got, wanted)
    assert len({fallback.reason for fallback in fused.last_run.fallbacks}) == 1


def raises_for_large_arguments(m, x):
    m.t.data = m.t.data * 0.5
    m.w.data.mul_(0.5)
    y = x @ m.w
    if x.max() > 9:
        raise ValueError("too large")
    return y + x @ m.t


def reads_out_of_range(m, x):
    m.t.data = m.t.data * 0.5
    m.w.data.mul_(0.5)
    return x @ m.w + F.embedding(x[:, 0].abs().long(), m.t)


@pytest.mark.parametrize(
    ("function", "error"), [(raises_for_large_arguments, ValueError), (reads_out_of_range, IndexError)]
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_an_error_in_the_middle_leaves_eagers_state(function, error, mode):
    def run(model: nn.Module, call: nn.Module) -> list[Any]:
        found, held = [], [*model.parameters(), *model.buffers()]
        for size in (1.0, 1.0, 50.0, 1.0, 50.0, 1.0):
            with mode(), contextlib.nullcontext() if size == 1 else pytest.raises(error):
                call(torch.ones(3, 4) * size)
            found.append(facts(model, held))
        return found

    wanted, got, fused = both(function, run)
    assert_same(got, wanted)
    assert not fused.last_run.fallbacks


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("function", [moving_average, clamped, to_another_module])
def test_the_check_puts_other_memory_back(function, train):
    report = check(Model(function), (torch.randn(3, 4),), train=train)
    assert report.passed, report


def test_freezing_leaves_reassigned_weights_alone():
    model = Model(moving_average).requires_grad_(False)
    eager, fused = copy.deepcopy(model), fuse.compile(model, freeze=True)
    for _ in range(3):
        assert_same(fused(torch.ones(3, 4)), eager(torch.ones(3, 4)))
    assert not fused.last_run.fallbacks


# ---- any order of statements -----------------------------------------------------------------------------------------


def nothing(_: Tensor) -> None:
    """A statement has no value."""


STATEMENTS: list[Callable[[Any, Tensor], Tensor | None]] = [
    lambda m, x: setattr(m.t, "data", m.t.data * 0.5 + 0.1),
    lambda m, x: setattr(m.w, "data", m.w.data * 0.9 + m.v.detach() * 0.1),
    lambda m, x: setattr(m.mean, "data", m.t.data + 0.5),
    lambda m, x: setattr(m.v, "data", torch.tanh(m.v)),
    lambda m, x: setattr(m.t, "data", m.t.data.t().contiguous()),
    lambda m, x: nothing(m.w.data.mul_(0.7)),
    lambda m, x: nothing(m.mean.data.add_(0.1)),
    lambda m, x: nothing(m.t.data[1:].mul_(0.5)),
    lambda m, x: torch.tanh(x @ m.w),
    lambda m, x: torch.sin(x @ m.t),
    lambda m, x: torch.tanh(x) @ m.v,
    lambda m, x: x * m.mean[0],
    lambda m, x: x @ m.w.t(),
    lambda m, x: x @ torch.tanh(m.w @ m.t),
]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, len(STATEMENTS) - 1), min_size=2, max_size=7), st.integers(1, 2))
def test_any_order_of_statements(chosen, forwards):
    def function(m, x):
        x = x @ m.v
        for number in chosen:
            made = STATEMENTS[number](m, x)
            x = x if made is None else made
        return x

    wanted, got, fused = both(function, trained, dtype=torch.float64, forwards=forwards, steps=2)
    assert_same(got, wanted)
    assert not fused.last_run.fallbacks
