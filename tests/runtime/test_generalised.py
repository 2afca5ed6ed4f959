"""Sizes between those that were captured: right at every size, whatever ``forward`` does with sizes."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
import sys
from collections.abc import Callable
from math import log2
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuse
from fuse.runtime.sizes import patience
from tests.fuzz.sizes import WIDTH, Model, attention, branch, mean_by_hand, several, windows
from tests.runtime.test_sizes_at_random import coincidence, counter, slices


@pytest.fixture(autouse=True)
def _made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new size gets its program at its first call."""
    monkeypatch.setattr(patience.Patience, "expected", lambda *_, **__: None)
    monkeypatch.setattr(patience, "AT_ONCE", 1_000_000)


def loop(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    out = []
    for t in range(x.shape[0]):
        h = torch.tanh(m.first(x[t]) + h)
        out.append(h)
    return torch.stack(out)


def plain(m: Model, x: Tensor) -> Tensor:
    return F.gelu(m.first(x)).softmax(-1)


def positions(m: Model, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[0], dtype=x.dtype)[:, None, None]
    return m.first(x) * torch.sin(places / 100.0)


MODE = "sine"
NAMES = {"factor": "half"}


def by_mode(m: Model, x: Tensor) -> Tensor:
    """A text that is only compared is no table that a size picks from."""
    y = m.first(x)[: x.shape[0] - 1]
    return torch.sin(y) if MODE == "sine" else torch.cos(y)


def by_keys(m: Model, x: Tensor) -> Tensor:
    """A text that picks from dictionaries is no size, and a constant in a list no step that is counted."""
    for key, name in NAMES.items():
        x = x * {"half": 0.5}[NAMES[key]] if name[0] == "h" else x
    return m.first(x).view(*x.shape[:-1], -1, 2)


def count_too(m: Model, x: Tensor) -> tuple[Tensor, int]:
    return m.first(x).sum((0, 1)), x.shape[0] * x.shape[1]


def halves(m: Model, x: Tensor) -> Tensor:
    return m.first(x[: x.shape[0] // 2]).relu()


def odd(m: Model, x: Tensor) -> Tensor:
    return m.first(x).relu() if x.shape[0] % 2 else m.first(x).tanh()


def every_seventh(m: Model, x: Tensor) -> Tensor:
    return m.first(x).relu() + (x.shape[0] % 7 == 3)


def one_number(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if x.size(0) == 17 else m.first(x).tanh()


def one_length(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if len(x) == 17 else m.first(x).tanh()


def one_count(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if x.numel() == 17 * 3 * WIDTH else m.first(x).tanh()


def one_stride(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if x.stride(0) == 3 * WIDTH else m.first(x).tanh()


def by_table(m: Model, x: Tensor) -> Tensor:
    return m.first(x) * {17: 2.0, 18: 3.0}.get(x.shape[0], 1.0)


def inner_size(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)[1:]
    return y.exp() if y.shape[0] == 16 else y.tanh()


def unseen_size(m: Model, x: Tensor) -> Tensor:
    """A size that is in no value of the graph: what has it is used by nobody."""
    y = torch.cat([x, x, x])[5:]
    return m.first(x).exp() if y.shape[0] == 3 * 17 - 5 else m.first(x).tanh()


def root(m: Model, x: Tensor) -> Tensor:
    return m.first(x) / math.sqrt(x.shape[0])


def text(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if str(x.shape[0]) == "17" else m.first(x).tanh()


def shape_of_two(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if x.shape == (17, 3, WIDTH) else m.first(x).tanh()


def grown(m: Model, x: Tensor) -> Tensor:
    return F.pad(m.first(x), (0, 0, 0, 0, 0, max(0, 20 - x.shape[0])))


def filled(m: Model, x: Tensor) -> Tensor:
    """Padded to one length for all sizes: by 64 less a size, which is cut off again in the backward pass."""
    return F.pad(m.first(x), (0, 0, 0, 0, 0, 64 - x.shape[0])).tanh()


def from_a_table(m: Model, x: Tensor) -> Tensor:
    """Relative positions: the middle of a table on both sides of a place."""
    steps = x.shape[0]
    table = torch.arange(100, dtype=x.dtype)[50 - steps : 50 + steps - 1] / 50
    distance = torch.arange(steps)[:, None] - torch.arange(steps) + steps - 1
    return torch.einsum("ts,sbw->tbw", torch.sin(table)[distance], m.first(x))


def into_a_cache(m: Model, x: Tensor) -> Tensor:
    cache = x.new_zeros(48, *x.shape[1:])
    cache[48 - x.shape[0] :] = m.first(x)
    return cache.cumsum(0)


def what_is_left(m: Model, x: Tensor) -> Tensor:
    rest = x.new_ones(48, *x.shape[1:])[x.shape[0] :]
    return m.first(x).exp() if rest.shape[0] == 48 - 17 else m.first(x).tanh() + rest.sum() / 100


def reshaped(m: Model, x: Tensor) -> Tensor:
    return m.first(x.flatten(0, 1)).view(x.shape[0], -1)


def reversed_loop(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    for t in range(x.shape[0] - 1, -1, -1):
        h = torch.tanh(m.first(x[t]) + h)
    return h


def last_apart(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    for t in range(x.shape[0]):
        h = torch.tanh(m.first(x[t]) + h)
        if t == x.shape[0] - 1:
            h = h * 3
    return h


def elements_of_shape(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if x.shape[:2].numel() == 51 else m.first(x).tanh()


def bytes_of(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if x.nbytes == 51 * WIDTH * x.itemsize else m.first(x).tanh()


def among(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if x.shape[0] in (17, 21) else m.first(x).tanh()


def among_set(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if x.shape[0] in {17, 21} else m.first(x).tanh()


def larger(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if max(x.shape[0], 16) == 17 else m.first(x).tanh()


def sorted_sizes(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if sorted(x.shape) == [3, WIDTH, 17] else m.first(x).tanh()


def rounded_up(m: Model, x: Tensor) -> Tensor:
    rest = -x.shape[0] % 4
    return F.pad(m.first(x), (0, 0, 0, 0, 0, rest)).unflatten(0, (-1, 4)).amax(1)


def true_division(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if x.shape[0] / 2 == 8.5 else m.first(x).tanh()


def converted(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if int(x.shape[0]) == 17 else m.first(x).tanh()


def with_numpy(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if np.prod(x.shape[:2]) == 51 else m.first(x).tanh()


def of_a_part(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if x.chunk(2)[0].shape[0] == 9 else m.first(x).tanh()


@functools.lru_cache(maxsize=64)
def table(length: int) -> float:
    return 2.0 if length == 17 else 1.0


def cached(m: Model, x: Tensor) -> Tensor:
    return m.first(x) * table(x.shape[0])


def strange_mask(m: Model, x: Tensor) -> Tensor:
    mask = torch.arange(x.shape[0]) % 5 == 2
    return m.first(x).masked_fill(mask[:, None, None], 0.0)


def blocks(m: Model, x: Tensor) -> Tensor:
    h, out = x.new_zeros(x.shape[1], WIDTH), []
    for part in x.split(4):
        h = torch.tanh(m.first(part.sum(0)) + h)
        out.append(h)
    return torch.stack(out)


def after_the_loop(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    for t in range(x.shape[0]):
        h = torch.tanh(m.first(x[t]) + h)
    return h.exp() if t == 16 else h


def every_other(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    for t in range(1, x.shape[0], 2):
        h = torch.tanh(m.first(x[t]) + h)
    return h.exp() if t == 15 else h


def length_of_list(m: Model, x: Tensor) -> Tensor:
    out = []
    for step in x:
        out.append(torch.tanh(m.first(step)))
    return out[0] if len(out) == 17 else torch.stack(out)


def counted_last(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    t = 0
    for t, step in enumerate(x):  # noqa: B007 (used behind the loop)
        h = torch.tanh(m.first(step) + h)
    return h.exp() if t == 16 else h


def by_length(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    for t in range(len(x)):
        h = torch.tanh(m.first(x[t]) + h)
    return h


def numbered(m: Model, x: Tensor) -> Tensor:
    out = []
    for t, step in enumerate(x):
        out.append(m.first(step) + (out[t - 1] if t else 0))
    return torch.stack(out)


def counted_by_hand(m: Model, x: Tensor) -> Tensor:
    h, steps = x.new_zeros(x.shape[1], WIDTH), 0
    for step in x:
        h = torch.tanh(m.first(step) + h)
        steps += 1
    return h.exp() if steps == 17 else h


def counted_by_sum(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if sum(1 for _ in x) == 17 else m.first(x).tanh()


def counted_on(m: Model, x: Tensor) -> Tensor:
    t = 0
    for t, _ in zip(itertools.count(), x):  # noqa: B007 (used behind the loop)
        pass
    return m.first(x).exp() if t == 16 else m.first(x).tanh()


def power_of_two(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if math.log2(x.shape[0]).is_integer() else m.first(x).tanh()


def power_by_its_name(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if log2(x.shape[0]).is_integer() else m.first(x).tanh()


def common_factor(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if math.gcd(x.shape[0], 34) == 17 else m.first(x).tanh()


def bits(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if bin(x.shape[0]).count("1") == 1 else m.first(x).tanh()


def rounded(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if round(x.shape[0], -1) == 20 else m.first(x).tanh()


def asked_by_function(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if torch.numel(x) == 51 * WIDTH else m.first(x).tanh()


def part_of_range(m: Model, x: Tensor) -> Tensor:
    t = 0
    for t in range(x.shape[0])[1:]:  # noqa: B007 (used behind the loop)
        pass
    return m.first(x).exp() if t == 16 else m.first(x).tanh()


def masked_by_numbers(m: Model, x: Tensor) -> Tensor:
    h, lengths = x.new_zeros(x.shape[1], WIDTH), torch.arange(x.shape[1]) * 3 + 2
    for t, step in enumerate(x):
        h = torch.where((t < lengths)[:, None], torch.tanh(m.first(step) + h), h)
    return h


def numbers_from_the_end(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    for t in range(x.shape[0]):
        h = torch.tanh(m.first(x[t]) * (x.shape[0] - t) + h)
    return h


def numbers_with_an_exception(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    for t in range(x.shape[0]):
        h = torch.tanh(m.first(x[t]) * (t if x.shape[0] != 17 else 2 * t) + h)
    return h


def numbers_with_a_bound(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    for t in range(x.shape[0]):
        h = torch.tanh(m.first(x[t]) * min(t, 16) + h)
    return h


def counted_in_pairs(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    for t, (one, other) in enumerate(zip(x, x, strict=True)):  # noqa: B007 (used behind the loop)
        h = torch.tanh(m.first(one) + other + h)
    return h.exp() if t == 16 else h


def counted_beside(m: Model, x: Tensor) -> Tensor:
    t = 0
    for t, _ in zip(range(1000), x, strict=False):  # noqa: B007 (used behind the loop)
        pass
    return m.first(x).exp() if t == 16 else m.first(x).tanh()


def length_of_range(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if len(range(x.shape[0])) == 17 else m.first(x).tanh()


def by_iterator(m: Model, x: Tensor) -> Tensor:
    steps = dict(enumerate(iter(x)))
    return m.first(x).exp() if max(steps) == 16 else m.first(x).tanh()


FACTORS = [1.0] * 17 + [3.0] + [1.0] * 40


def by_list(m: Model, x: Tensor) -> Tensor:
    return m.first(x) * FACTORS[x.shape[0]]


def by_part_of_list(m: Model, x: Tensor) -> Tensor:
    return m.first(x) * sum(FACTORS[x.shape[0] : x.shape[0] + 1])


ARRAY = np.array(FACTORS)


def by_array(m: Model, x: Tensor) -> Tensor:
    return m.first(x) * float(ARRAY[x.shape[0]])


def by_text(m: Model, x: Tensor) -> Tensor:
    return m.first(x) * {"17 steps": 3.0}.get("%d steps" % x.shape[0], 1.0)  # noqa: UP031 (what is tested)


def by_type(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if type(x.shape[0]) is int and x.shape[0] == 17 else m.first(x).tanh()


def real_part(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if x.shape[0].real == 17 else m.first(x).tanh()


def scaled(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if math.ldexp(1.0, x.shape[0]) == 2.0**17 else m.first(x).tanh()


def refused_bits(m: Model, x: Tensor) -> Tensor:
    try:
        return m.first(x).exp() if x.shape[0] & 31 == 17 else m.first(x).tanh()
    except Exception:
        return m.first(x).tanh()


def counted_by_hops(m: Model, x: Tensor) -> Tensor:
    h, place, hop = x[0], 0, 2
    for step in x:
        h = torch.tanh(m.first(h) + step)
        place += hop
    return h.exp() if place == 34 else h


def counted_by_dimensions(m: Model, x: Tensor) -> Tensor:
    return m.first(x).exp() if sum(step.dim() for step in x) == 34 else m.first(x).tanh()


def length_of_rest(m: Model, x: Tensor) -> Tensor:
    first, *rest = x.unbind(0)
    return m.first(first).exp() if len(rest) % 5 == 1 else m.first(first).tanh()


FUNCTIONS = [torch.tanh] * 17 + [torch.exp] + [torch.tanh] * 40


def by_function(m: Model, x: Tensor) -> Tensor:
    return FUNCTIONS[x.shape[0]](m.first(x))


def infer(model: nn.Module, double: nn.Module, fused: Any, x: Tensor) -> None:
    with torch.no_grad():
        got, eager, exact = (as_list(m(y)) for m, y in ((fused, x), (model, x), (double, x.double())))
    for one, own, right in zip(got, eager, exact, strict=True):
        assert type(one) is type(own)
        if isinstance(one, Tensor):
            torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=1e-5)
            assert (one.shape, one.stride(), one.dtype) == (own.shape, own.stride(), own.dtype)
        else:
            assert one == own


def as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


SERVED = [
    loop, plain, attention, positions, by_keys, count_too, reshaped, reversed_loop, one_number, by_length, by_mode,
    filled,
]  # fmt: skip
OTHERS = [
    branch, windows, mean_by_hand, several, coincidence, counter, slices, halves, odd, every_seventh, one_length,
    one_count, one_stride, inner_size, unseen_size, by_table, root, text, shape_of_two, grown, last_apart,
    elements_of_shape, bytes_of, among, among_set, larger, sorted_sizes, rounded_up, true_division, converted,
    numbered, after_the_loop, every_other, length_of_list, counted_last, with_numpy, of_a_part, cached,
    strange_mask, blocks, counted_by_hand, counted_by_sum, counted_on, power_of_two, power_by_its_name, common_factor,
    bits, rounded, asked_by_function, part_of_range, masked_by_numbers,
    numbers_from_the_end, numbers_with_an_exception, numbers_with_a_bound, from_a_table, into_a_cache, what_is_left,
]  # fmt: skip


def shapes(count: int, seed: int) -> list[tuple[int, int]]:
    numbers = random.Random(seed)
    corners = [(3, 2), (40, 6), (4, 5), (39, 2)]
    found = [(numbers.randint(3, 40), numbers.randint(2, 6)) for _ in range(count)]
    return [*corners, *found, (17, 3), (16, 3), (18, 3), (5, 5), (22, 4)]


@pytest.mark.sampled
@pytest.mark.parametrize("function", SERVED + OTHERS)
def test_every_size_is_right(function: Callable[..., Any]) -> None:
    model = Model(function).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    resized = 0
    for shape in shapes(3, seed=3):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
        assert not fused.last_run.fallbacks
        resized += fused.compiled.resized
    assert resized >= 2 or function not in SERVED


@pytest.mark.sampled
@pytest.mark.parametrize(
    "function",
    [
        counted_in_pairs, counted_beside, length_of_range, by_iterator, by_list, by_part_of_list, by_array, by_text,
        by_type, real_part, scaled, refused_bits, counted_by_hops, counted_by_dimensions, length_of_rest, by_function,
    ],
)  # fmt: skip
def test_a_single_size_apart_is_seen(function: Callable[..., Tensor]) -> None:
    """Whatever way ``forward`` tells 17 steps from all others."""
    model = Model(function).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in [(10, 2), (40, 6), (20, 3), (13, 4), (17, 3)]:
        infer(model, double, fused, torch.randn(*shape, WIDTH))


@pytest.mark.parametrize(
    ("function", "lengths"),
    [(grown, (20, 21, 22, 38, 11)), (rounded_up, (25, 31, 32, 26, 14)), (into_a_cache, (11, 28, 29, 5, 12))],
)
def test_a_third_length_is_right_where_two_tell_little(
    function: Callable[..., Tensor], lengths: tuple[int, ...]
) -> None:
    """A formula through two lengths gives the third one a negative size."""
    model = Model(function).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for length in lengths:
        infer(model, double, fused, torch.randn(length, 3, WIDTH))


@pytest.mark.parametrize("length", [7, 15, 16])
def test_a_size_that_is_another_by_chance_is_not_taken_for_it(length: int) -> None:
    """Half of 7 or 15 steps, rounded up, is the batch size or a width."""
    model = Model(of_a_part).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in [(3, 2), (40, 6), (5, 5), (39, 3), (length, 4), (17, 3), (18, 4)]:
        infer(model, double, fused, torch.randn(*shape, WIDTH))


# ---- training --------------------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """A gradient of the user's own, which looks at a size in the backward pass only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]  # as torch calls it
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # as torch calls it
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * (2.0 if x.shape[0] == 17 else 1.0)


def own_gradient(m: Model, x: Tensor) -> Tensor:
    return Doubled.apply(m.first(x)).tanh()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def unpacked(saved: Tensor) -> Tensor:
    return saved * 2 if saved.dim() == 3 and saved.shape[0] == 17 else saved


def hooks_of_saved(m: Model, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpacked):
        return m.first(x).sin()


def checkpointed(m: Model, x: Tensor) -> Tensor:
    return checkpoint(lambda y: m.first(y).tanh() if y.shape[0] > 16 else m.first(y).exp(), x, use_reentrant=False)


def detached_at(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    return (y.detach() if x.shape[0] == 17 else y).tanh() * x


def asks_for_gradients(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    return y.exp() if y.requires_grad and x.shape[0] == 17 else y.tanh()


def two_results(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    h, out = x.new_zeros(x.shape[1], WIDTH), []
    for t in range(x.shape[0]):
        h = torch.tanh(m.first(x[t]) * h + x[t])
        out.append(h)
    return torch.stack(out), h.exp()


def mean(m: Model, x: Tensor) -> Tensor:
    return m.first(x).mean(0) + x.mean((0, 1))


def dropped(m: Model, x: Tensor) -> Tensor:
    return F.dropout(m.first(x), 0.3, training=True).tanh()


TRAINED = [loop, attention, two_results, mean, dropped, masked_by_numbers, filled]
OTHERS_TRAINED = [
    branch, inner_size, own_gradient, hooks_of_saved, checkpointed, detached_at, asks_for_gradients
]  # fmt: skip


def train(model: nn.Module, reference: nn.Module, fused: Any, x: Tensor, wanted: int) -> None:
    """One training step, the loss made of the results that ``wanted`` has a bit for."""
    found = []
    for one, own in ((fused, x.clone()), (reference, x.to(next(reference.parameters()).dtype))):
        one.zero_grad()
        own.requires_grad_()
        torch.manual_seed(len(x))
        results = as_list(one(own))
        chosen = [r for i, r in enumerate(results) if len(results) == 1 or wanted >> i & 1]
        sum((r * torch.linspace(0, 1, r.numel(), dtype=r.dtype).view(r.shape)).sum() for r in chosen).backward()
        found.append([*results, own.grad, *(p.grad for p in one.parameters())])
    for mine, right in zip(*found, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            torch.testing.assert_close(mine.double(), right.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("function", TRAINED + OTHERS_TRAINED)
def test_gradients_are_right_at_every_size(function: Callable[..., Any]) -> None:
    model = Model(function)
    double = model if function is dropped else copy.deepcopy(model).double()  # masks are drawn for floats
    fused, resized = fuse.compile(model), 0
    for number, shape in enumerate(shapes(0, seed=3)):
        train(model, double, fused, torch.randn(*shape, WIDTH), 1 + number % 3)
        assert not fused.last_run.fallbacks
        resized += fused.compiled.resized
    assert resized or function not in TRAINED
    assert not resized or function not in (own_gradient, hooks_of_saved, checkpointed)


def mean_of_all(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(x * m.first.bias).mean((0, 1))


def squared_error(m: Model, x: Tensor) -> Tensor:
    return F.mse_loss(x * m.first.bias, x.detach()) * m.first.bias


@pytest.mark.parametrize("function", [mean_of_all, squared_error])
def test_batches_of_as_many_tokens_say_nothing_of_others(function: Callable[..., Any]) -> None:
    """Gradients are divided by the number of tokens, which was the same in all captured calls."""
    model = Model(function)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for length, batch in [(8, 6), (12, 4), (16, 3), (24, 2), (6, 8), (10, 4), (14, 3)]:
        train(model, double, fused, 30 * torch.randn(length, batch, WIDTH), 1)


def joined(m: Model, x: Tensor) -> Tensor:
    """Of n0 + 2 * n1 rows."""
    return torch.tanh(m.first(torch.cat([x[:, 0], x[0], x[0]])))


def all_pairs(m: Model, x: Tensor) -> Tensor:
    """A mean over n0 * n1 * n1 rows."""
    y = x.transpose(0, 1)
    return (y[:, None] * y[None] * m.first.bias).mean((0, 1, 2))


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (joined, [(16, 2), (12, 4), (10, 5), (6, 7), (14, 4), (10, 4)]),  # 20 rows in the first four
        (all_pairs, [(36, 2), (16, 3), (9, 4), (4, 6), (20, 3)]),  # 144 rows in the first four
    ],
)
def test_what_sizes_always_gave_together_says_nothing_of_others(
    function: Callable[..., Tensor], sizes: list[tuple[int, int]]
) -> None:
    model = Model(function)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for length, batch in sizes:
        infer(model, double, fused, torch.randn(length, batch, WIDTH))
        if function is all_pairs:
            train(model, double, fused, 30 * torch.randn(length, batch, WIDTH), 1)


def test_weights_are_frozen_and_trained_between_captured_sizes() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    other, numbers, resized = copy.deepcopy(model), random.Random(7), 0
    fused = fuse.compile(model)
    for call in range(42):
        x = torch.randn(numbers.randint(3, 90), WIDTH)
        for one in (model, other):
            one[0].weight.requires_grad_(call // 14 != 1)
            one.zero_grad()
        for one in (fused, other):
            one(x).square().sum().backward()
        for mine, own in zip(model.parameters(), other.parameters(), strict=True):
            assert (mine.grad is None) == (own.grad is None)
            if own.grad is not None:
                torch.testing.assert_close(mine.grad, own.grad, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(model[1].running_var, other[1].running_var)
        assert model[1].num_batches_tracked == other[1].num_batches_tracked
        resized += fused.compiled.resized
    assert resized >= 10


# ---- what else changes -----------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """A weight, a buffer that calls write, and a list of tensors that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("total", torch.zeros(WIDTH))
        self.held = [torch.ones(WIDTH)]
        self.factor = 1.0

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        h = self.inner(x) * self.held[0] * self.factor * scale
        self.total += h.sum((0, 1))
        y.mul_(2.0)
        return h + y.sum()


def test_state_inputs_and_attributes_are_followed_between_captured_sizes() -> None:
    model = Stateful().eval()
    other, fused = copy.deepcopy(model), fuse.compile(model)
    numbers, resized = random.Random(5), 0
    with torch.no_grad():
        for call in range(60):
            x = torch.randn(numbers.randint(3, 40), numbers.randint(2, 6), WIDTH)
            y = torch.randn(numbers.randint(3, 9))
            if call % 10 == 9:
                for m in (model, other):
                    m.held[0].mul_(1.5)
                    m.inner.weight.mul_(0.9)
            if call == 45:
                model.factor = other.factor = 2.0
            scale = 0.5 if call % 7 == 0 else 1.0
            mine, theirs = y.clone(), y.clone()
            torch.testing.assert_close(fused(x, mine, scale), other(x, theirs, scale), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine, theirs)
            torch.testing.assert_close(model.total, other.total, rtol=1e-4, atol=1e-3)
            resized += fused.compiled.resized
    assert resized >= 10


@pytest.mark.parametrize(
    "arrange", [lambda x: x.transpose(0, 1), lambda x: x[:, :, ::2], lambda x: x[:, :1].expand(-1, 3, -1)]
)
def test_layouts_are_eagers_between_captured_sizes(arrange: Callable[[Tensor], Tensor]) -> None:
    model = Model(lambda m, x: m.first(x.flip(-1) if x.shape[-1] == WIDTH else x.repeat(1, 1, 2)).relu()).eval()
    fused, numbers = fuse.compile(model), random.Random(2)
    with torch.no_grad():
        for _ in range(30):
            x = arrange(torch.randn(numbers.randint(3, 30), numbers.choice([1, 4]), WIDTH))
            got, want = fused(x), model(x)
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()


class Embedded(nn.Module):
    """Whole numbers as arguments, and a weight that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.held = [torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.table(x)) * self.held[0])


def double(model: Embedded) -> None:
    model.double()


def other_strides(model: Embedded) -> None:
    model.inner.weight.data = torch.randn(2 * WIDTH, WIDTH)[::2]


def other_shape(model: Embedded) -> None:
    model.inner.weight.data, model.inner.bias.data = torch.randn(1, WIDTH), torch.randn(1)


def unregistered(model: Embedded) -> None:
    model.held[0].data = torch.full((WIDTH,), 2.0, dtype=torch.float64)


@pytest.mark.parametrize("change", [double, other_strides, other_shape, unregistered])
def test_tensors_of_the_model_may_change_between_captured_sizes(change: Callable[[Embedded], None]) -> None:
    model, numbers = Embedded().eval(), random.Random(1)
    fused, resized = fuse.compile(model), 0
    with torch.no_grad():
        for call in range(22):
            if call == 14:
                assert resized >= 3
                change(model)
            x = torch.randint(0, 50, (numbers.randint(3, 40), numbers.randint(2, 6)))
            torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)
            resized += fused.compiled.resized


def test_one_tensor_given_twice_is_no_member() -> None:
    model = Model(lambda m, x, y: y.add_(m.first(x)) + x).eval()
    model.forward = lambda x, y: y.add_(model.first(x)) + x  # type: ignore[method-assign]
    fused, numbers = fuse.compile(model), random.Random(2)
    with torch.no_grad():
        for call in range(40):
            x = torch.randn(numbers.randint(3, 30), numbers.randint(2, 5), WIDTH)
            y = x if call > 20 and call % 2 else torch.randn_like(x)
            mine = x.clone()
            other = mine if y is x else y.clone()
            torch.testing.assert_close(fused(x, y), model(mine, other))
            torch.testing.assert_close(y, other)


def test_an_error_of_one_size_is_eagers() -> None:
    model = Model(lambda m, x: m.first(x).view(x.shape[0] // 2, 2, 3 * WIDTH)).eval()
    fused = fuse.compile(model)
    with torch.no_grad():
        for length in (2, 4, 8, 10, 16, 20, 22, 30, 6, 12, 14):
            assert fused(torch.randn(length, 3, WIDTH)).shape == (length // 2, 2, 3 * WIDTH)
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            fused(torch.randn(7, 3, WIDTH))


def test_even_sizes_say_nothing_of_odd_ones() -> None:
    factors = [1.0, 3.0] * 21
    model = Model(lambda m, x: m.first(x) * factors[x.shape[0]]).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in [(10, 2), (40, 6), (20, 3), (30, 5), (12, 4), (17, 3), (25, 4)]:
        infer(model, double, fused, torch.randn(*shape, WIDTH))


def test_functions_of_python_are_its_own_again() -> None:
    before = [math.log2, math.gcd, bin, range, len, enumerate, sys.getprofile()]
    test_every_size_is_right(plain)
    assert [math.log2, math.gcd, bin, range, len, enumerate, sys.getprofile()] == before
