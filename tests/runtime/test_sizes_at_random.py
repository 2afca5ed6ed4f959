"""Models that decide by sizes, at many sizes, in inference and training: right, and compiled for few of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.graph.function import Function
from tests.fuzz.sizes import WIDTH, Model, attention, branch, infer, mean_by_hand, several, train, windows


def small_windows(m: Model, x: Tensor) -> Tensor:
    return windows(m, x, 16)


def counter(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], WIDTH)
    for t, step in enumerate(x):
        h = torch.tanh(m.first(h) + step)
        if t == 9:
            h = h * 0.5
    return h


def coincidence(m: Model, x: Tensor) -> Tensor:
    return m.first(x).relu() if x.shape[0] == x.shape[1] else m.first(x).transpose(0, 1).exp()


def slices(m: Model, x: Tensor) -> Tensor:
    y = m.first(x)
    return torch.cat([y[:9].sum(0), y[-5:].mean(0), y[2 : x.shape[0] - 1 : 2].sum(0), y[x.shape[0] // 2 :].amax(0)])


MODELS = [branch, small_windows, mean_by_hand, several, attention, counter, coincidence, slices]


def shapes(count: int, seed: int) -> list[tuple[int, int]]:
    numbers = random.Random(seed)
    found = [(numbers.randint(2, 30), numbers.randint(1, 6)) for _ in range(count)]
    return [*found, (5, 5), (1, 4)]


@pytest.mark.sampled
@pytest.mark.usefixtures("captured_at_once")
@pytest.mark.parametrize("function", MODELS)
def test_inference_is_right_at_every_size(function: Callable[..., Tensor]) -> None:
    model = Model(function).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in shapes(7, seed=1):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
        assert not fused.last_run.fallbacks


@pytest.mark.sampled
@pytest.mark.usefixtures("captured_at_once")
@pytest.mark.parametrize("function", MODELS)
def test_training_is_right_at_every_size(function: Callable[..., Tensor]) -> None:
    model = Model(function)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in shapes(3, seed=2):
        train(model, double, fused, torch.randn(*shape, WIDTH))


@pytest.mark.sampled
@pytest.mark.usefixtures("captured_at_once")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (branch, [(30, 3), (25, 4), (20, 2), (17, 5), (40, 6)]),
        (mean_by_hand, [(30, 3), (25, 4), (20, 6), (17, 5), (9, 2)]),
        (small_windows, [(27, 3), (13, 7), (44, 2), (60, 5), (3, 2)]),
        (small_windows, [(16, 3), (32, 4), (48, 5), (64, 2), (80, 6)]),
    ],
)
def test_few_calls_compile(
    function: Callable[..., Tensor],
    sizes: list[tuple[int, int]],
    training: bool,
    compiled_sources: list[str],
    empty_cache: Path,
) -> None:
    model = Model(function).train(training)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    compiling = 0
    for shape in sizes:
        before = len(compiled_sources)
        (train if training else infer)(model, double, fused, torch.randn(*shape, WIDTH))
        compiling += len(compiled_sources) > before
    assert compiling <= (3 if training else 2)  # for a size, for all sizes; backward once more


@pytest.mark.usefixtures("captured_at_once")
def test_a_batch_of_one_has_the_kernel_of_others(compiled_sources: list[str], empty_cache: Path) -> None:
    model = Model(branch).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in ((30, 3), (25, 4)):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
    before = len(compiled_sources)
    infer(model, double, fused, torch.randn(20, 1, WIDTH))
    assert len(compiled_sources) == before


@pytest.mark.usefixtures("captured_at_once")
def test_attention_of_a_batch_of_one_has_the_kernel_of_others(compiled_sources: list[str], empty_cache: Path) -> None:
    """Although its heads are viewed where those of others are copied."""
    model = Model(attention).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in ((30, 3), (25, 4)):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
    before = len(compiled_sources)
    for shape in ((20, 1), (1, 1), (1, 5), (40, 1)):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
        assert not fused.last_run.fallbacks
    assert len(compiled_sources) == before


@pytest.mark.usefixtures("captured_at_once")
def test_attention_that_only_ever_has_a_batch_of_one_copies_nothing(
    compiled_sources: list[str], empty_cache: Path
) -> None:
    model = Model(attention).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in ((30, 1), (25, 1), (20, 1), (14, 1)):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
        if shape[0] > 20:  # later ones have no graph
            assert fused.compiled.graph is not None
            assert "clone" not in fused.compiled.graph.print_readable(print_output=False)
    assert len(compiled_sources) <= 4


@pytest.mark.usefixtures("captured_at_once")
def test_rows_of_any_length_are_reduced_in_lanes(compiled_sources: list[str], empty_cache: Path) -> None:
    """What is left behind the last whole vector takes part, and what lies behind the row does not."""

    def rows(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return x.masked_fill(mask, float("-inf")).softmax(-1), x.amax(-1), torch.where(mask, x, 1.0).prod(-1)

    fused = fuse.compile(Function(rows))
    for length in (33, 20, 1, 2, 15, 16, 17, 47, 64):
        x, mask = torch.randn(3, length), torch.rand(3, length) < 0.3
        x[1, -1] = float("nan")
        mask[:, 0] = mask[1] = False
        given = [torch.full((3, 2 * length), 1e30), torch.full((3, 2 * length), True)]  # rows lie apart, in others
        for whole, part in zip(given, (x, mask), strict=True):
            whole[:, :length] = part
        for got, exact in zip(fused(*(whole[:, :length] for whole in given)), rows(x.double(), mask), strict=True):
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert sum("fuse_across<8>(" in source for source in compiled_sources) == 2  # of 33, and of all


@pytest.mark.usefixtures("captured_at_once")
@pytest.mark.parametrize("function", [attention, mean_by_hand])
def test_one_step_has_the_kernels_of_several(
    function: Callable[..., Tensor], compiled_sources: list[str], empty_cache: Path
) -> None:
    """Although its mask is of equal elements, and its number 1."""
    model = Model(function).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in ((30, 3), (11, 5)):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
    before = len(compiled_sources)
    for shape in ((1, 6), (4, 2)):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
        assert not fused.last_run.fallbacks
    assert len(compiled_sources) == before


@pytest.mark.usefixtures("captured_at_once")
@pytest.mark.parametrize(("seen", "new"), [((11, 5), 0), ((8, 4), 1)])
def test_a_branch_that_is_taken_for_the_first_time_is_compiled_for_all_sizes(
    seen: tuple[int, int], new: int, compiled_sources: list[str], empty_cache: Path
) -> None:
    """Unless its sizes may be mistaken for widths."""
    model = Model(branch).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in ((30, 3), seen):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
    before = len(compiled_sources)
    for shape in ((9, 7), (6, 2), (10, 10), (12, 1), (1, 4)):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
    assert len(compiled_sources) - before == new


@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), min_size=4, max_size=8),
    start=st.integers(-9, 9),
    end=st.integers(-9, 15),
    step=st.integers(1, 3),
    lies=st.sampled_from(["dense", "transposed", "strided", "expanded"]),
)
@settings(max_examples=6, deadline=None)
def test_slices_of_inputs_of_all_layouts(
    sizes: list[tuple[int, int]], start: int, end: int, step: int, lies: str
) -> None:
    class Sliced(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            part = x[start:end:step]
            return torch.tanh(part) * 2 + 1, part.sum(0) - x.shape[0]

    fused = fuse.compile(Sliced())
    for rows, columns in sizes:
        x = {
            "dense": lambda r, c: torch.randn(r, c),
            "transposed": lambda r, c: torch.randn(c, r).t(),
            "strided": lambda r, c: torch.randn(2 * r, 3 * c)[::2, ::3],
            "expanded": lambda r, c: torch.randn(1, c).expand(r, c),
        }[lies](rows, columns)
        for got, expected in zip(fused(x), Sliced()(x), strict=True):
            torch.testing.assert_close(got, expected)
            assert got.stride() == expected.stride()


class Shifted(nn.Module):
    """Adds rows to rows, or one row to each of them."""

    def forward(self, x: Tensor, last: int) -> Tensor:
        return torch.tanh(x[:5] + x[5:last]) * 2


@pytest.mark.usefixtures("captured_at_once")
@pytest.mark.parametrize("lasts", [(10, 6, 10, 6, 6), (6, 10, 6, 10, 10), (6, 6, 10, 10, 6)])
def test_one_row_is_broadcast_and_several_are_not(lasts: tuple[int, ...]) -> None:
    model = Shifted()
    fused = fuse.compile(model)
    for width, last in zip((7, 9, 16, 23, 1), lasts, strict=True):
        x = torch.randn(10, width)
        torch.testing.assert_close(fused(x, last), model(x, last))


class Decoder(nn.Module):
    """One token at a time, with a cache of what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.all(x).chunk(3, -1)
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        return self.out(torch.softmax(q @ keys.transpose(1, 2), -1) @ values), keys, values


@pytest.mark.parametrize("settled", [8, 1_000_000])
def test_tokens_with_a_cache_that_grows_are_compiled_for_few_lengths(
    settled: int, compiled_sources: list[str], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuse.runtime.sizes.patience.SETTLED", settled)
    model = Decoder().eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    caches = torch.randn(2, 3, 0, WIDTH)
    mine, theirs, compiling = tuple(caches), tuple(caches.double()), 0
    with torch.no_grad():
        for _ in range(64):
            x = torch.randn(3, 1, WIDTH)
            before = len(compiled_sources)
            got, *mine = fused(x, *mine)
            compiling += len(compiled_sources) > before
            expected, *theirs = double(x.double(), *theirs)
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    assert compiling <= 4


EXPRESSIONS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "cut by a remainder of a remainder": lambda y, n, b: y[: n % 8 % 3 + 1],
    "cut by a difference of remainders": lambda y, n, b: y[: n % 4 - n % 2 + 1],
    "cut by a remainder of a sum": lambda y, n, b: y[: (n + b - n // 5) % 7 + 1],
    "scaled by a quotient of a sum": lambda y, n, b: y * (abs((n % 5 - n // 3) // 9) + 1),
    "cut to a chunk": lambda y, n, b: y.chunk(3)[0] * (n // 3) + y[: n // 3].mean(0),
    "cut to what a stride leaves": lambda y, n, b: y[: y[::3].shape[0]] + y[: n // 3].mean(0),
    "padded to whole windows": lambda y, n, b: F.pad(y, (0, 0, 0, 0, n % 5, -n % 8)) * (n // 8),
    "padded by a remainder of a sum": lambda y, n, b: F.pad(y, (0, 0, 0, 0, 0, (n * 9 - b * 2 % 3) % 6)),
}


@pytest.mark.sampled
@pytest.mark.usefixtures("captured_at_once")
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_quotients_and_remainders_are_right_at_every_length(name: str) -> None:
    """No constant and no formula of another form, which captured lengths happen to fit, serves others: in the first
    lengths, the differences and the remainders of remainders are equal."""
    model = Model(lambda m, x: torch.tanh(EXPRESSIONS[name](m.first(x), *x.shape[:2]))).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    every = random.Random(0).sample(range(9, 91), 82)
    for length in (48, 53, 116, 61, 92, 45, 24, 50, 51, 66, *every):
        infer(model, double, fused, torch.randn(length, 4, WIDTH))
