"""Sizes that are computed by a division are known at other sizes: strided convolutions, pools, windows, halves, chunks,
paddings, crops."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.runtime.sizes import other_remainders, patience
from tests.fuzz.layers import first_wrong
from tests.fuzz.sizes import WIDTH, Model, infer, train
from tests.runtime.test_reaching import captures  # noqa: F401  (a fixture)


class Speech(nn.Module):
    """Two strided convolutions, a layer over what is left, and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(WIDTH, 12, 3, stride=2, padding=1)
        self.second = nn.Conv1d(12, 12, 5, stride=3)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.second(F.gelu(self.first(x.transpose(1, 2))))).transpose(1, 2)
        return torch.log_softmax(self.last(y - y.mean(1, keepdim=True)), -1)


class Image(nn.Module):
    """Convolutions and a pool over an image of any height and width; ``rounds_up``: the pool's last window may end
    outside."""

    def __init__(self, rounds_up: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 12, 3, 2, 1), nn.Conv2d(12, 10, 3, 2, 1)
        self.rounds_up = rounds_up

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(torch.relu(self.first(x)), 2, ceil_mode=self.rounds_up)
        return torch.relu(self.second(y)).mean((2, 3))


def _called(model: nn.Module, sizes: list[tuple[int, ...]], training: bool = False) -> None:
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for size in sizes:
        (train if training else infer)(model, double, fused, torch.randn(size))
        assert not fused.last_run.fallbacks


def _pairs(count: int) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [(draw.randint(2, 9), draw.randint(50, 150), WIDTH) for _ in range(count)]


@pytest.mark.parametrize("training", [False, True])
def test_strided_convolutions_of_any_length_are_captured_at_few(
    training: bool,
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    torch.manual_seed(0)
    _called(Speech().train(training), _pairs(30), training)
    assert len(captures) <= 20


def test_images_of_any_height_and_width_are_captured_at_few(
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    torch.manual_seed(0)
    draw = random.Random(0)
    _called(Image().eval(), [(draw.randint(2, 5), 3, draw.randint(24, 80), draw.randint(24, 80)) for _ in range(40)])
    assert len(captures) <= 20


def test_pools_that_round_up_are_captured_at_few(
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    torch.manual_seed(0)
    draw = random.Random(0)
    sizes = [(draw.randint(2, 5), 3, draw.randint(24, 80), draw.randint(24, 80)) for _ in range(30)]
    _called(Image(rounds_up=True).eval(), sizes)
    assert len(captures) <= 18


def every_other(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x))[::2].softmax(-1)


def _lengths(count: int) -> list[tuple[int, ...]]:
    """Lengths, each with a batch."""
    draw = random.Random(0)
    return [(draw.randint(20, 90), draw.randint(2, 7), WIDTH) for _ in range(count)]


def overlapping(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x).unfold(0, 8, 4)).sum(-1)


@pytest.mark.parametrize(("function", "training"), [(every_other, False), (overlapping, False), (overlapping, True)])
def test_windows_and_every_other_row_are_captured_at_few(
    function: Callable[[Model, Tensor], Tensor],
    training: bool,
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    torch.manual_seed(0)
    _called(Model(function).train(training), _lengths(30), training)
    assert len(captures) <= 14


def two_roundings(m: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.first(x)
    return torch.tanh(y[2::4] * 2), torch.tanh(y.unfold(0, 4, 4)).sum(-1)


def test_sizes_that_were_equal_are_apart_where_their_formulas_differ(
    captures: list[tuple[int, ...]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(length + 1) // 4 rows and length // 4 windows: they are equal at the first lengths, and differ at 47."""
    monkeypatch.setattr(other_remainders, "FURTHEST", 0)  # no made-up call shows that they differ
    _called(Model(two_roundings).eval(), [(n, 3, WIDTH) for n in (21, 30, 44, 53, 70, 61, 36, 45, 46, 47, 51, 63, 49)])
    assert any(shape[0] == 47 for shape in captures)


class Beside(nn.Module):
    """A strided convolution beside a function of its input, or before it."""

    def __init__(self, function: Callable[[nn.Conv1d, Tensor], Tensor], *convolution: int) -> None:
        super().__init__()
        self.function, self.first = function, nn.Conv1d(6, 6, *convolution)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first, x)


COMPUTED_INSIDE = {
    "chunk": lambda first, x: torch.tanh(first(x)).sum(-1) + torch.sigmoid(x.chunk(3, -1)[0]).sum(-1),
    "interpolate": lambda first, x: torch.tanh(first(x)).sum(-1) + F.interpolate(x, scale_factor=1 / 3).sum(-1),
}


@pytest.mark.parametrize("function", COMPUTED_INSIDE.values(), ids=COMPUTED_INSIDE)
@pytest.mark.parametrize("rest", [1, 2])
def test_sizes_that_torch_computes_from_others_are_no_formulas(
    function: Callable[[nn.Conv1d, Tensor], Tensor],
    rest: int,
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    """A third of the length, rounded in two ways: both are equal unless the length leaves ``rest``."""
    torch.manual_seed(0)
    model = Beside(function, 2, 3).eval()
    lengths = [n for n in (14, 18, 23, 33, 27, 36, 48, 21, 25, 31, 43, 22) if n % 3 != rest]
    sizes = [(b, 6, n) for b, n in zip((2, 3, 5, 4, 7, 6, 3, 8, 2, 4), lengths, strict=False)]
    _called(model, [*sizes, (3, 6, 33 + rest), (4, 6, 27 + rest), (5, 6, 39 + rest)])


def test_a_count_that_all_captured_calls_had_is_no_constant(
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    """The mean is over 24 numbers in the first calls: its gradient is divided by that."""
    torch.manual_seed(0)

    def centred(first: nn.Conv1d, x: Tensor) -> Tensor:
        y = F.pad(first(x), (1, 1))
        return torch.tanh(y - y.mean((0, 2), keepdim=True))

    alike = [(2, 6, 20), (3, 6, 12), (4, 6, 7), (6, 6, 4), (2, 6, 19), (3, 6, 11), (4, 6, 8)]
    _called(Beside(centred, 1, 2).train(), [*alike, (5, 6, 5), (3, 6, 7), (5, 6, 18), (4, 6, 17)], True)


@pytest.mark.parametrize("training", [False, True])
def test_odd_images_have_the_kernels_of_even_ones(
    training: bool, empty_cache: Path, compiled_sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even heights are twice what a stride of two leaves, so that n * n could be 4 * (n // 2) ** 2, too."""
    monkeypatch.setattr(patience, "SETTLED", 1_000_000)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 10, 3, 2, 1), nn.ReLU())
    double, fused = copy.deepcopy(model).double(), fuse.compile(model.train(training))
    compiled = []
    for batch, size in ((8, 62), (8, 56), (6, 10), (9, 40), (6, 33), (5, 45), (3, 41)):
        before = len(compiled_sources)
        (train if training else infer)(model, double, fused, torch.randn(batch, 3, size, size))
        compiled.append(len(compiled_sources) > before)
        assert not fused.last_run.fallbacks
    assert compiled == [True, True, True, False, False, False, False]  # the batch varies from the third call on


def padded_windows(m: Model, x: Tensor) -> Tensor:
    """As a Swin transformer: the windows are counted in the padded tensor."""
    length, batch, _ = x.shape
    y = F.pad(m.first(x), (0, 0, 0, 0, 0, -length % 8))
    whole, _, _ = y.shape
    windows = y.view(whole // 8, 8, batch, WIDTH)
    return (windows - windows.mean(1, keepdim=True)).reshape(whole, batch, WIDTH)[:length]


def half(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x)[: x.shape[0] // 2])


def chunks(m: Model, x: Tensor) -> Tensor:
    first, second = m.first(x).chunk(2)
    return torch.tanh(first).sum(0) * torch.sigmoid(second).sum(0)


def one_chunk(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(torch.chunk(m.first(x), 3)[0])


def half_as_high(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(F.interpolate(m.first(x).permute(1, 2, 0), scale_factor=0.5))


def shifted(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(torch.roll(m.first(x), (x.shape[0] // 3,), 0)) * (x.shape[0] % 7 + 2)


def to_a_third(m: Model, x: Tensor) -> Tensor:
    """The last position is known from a tensor whose values nobody reads."""
    last = x[::3].shape[0]
    return torch.tanh(m.first(x)[:last]) + m.first(x)[last]


FUNCTIONS_OF_QUOTIENTS = [padded_windows, half, chunks, one_chunk, half_as_high, shifted, to_a_third]


@pytest.mark.sampled
@pytest.mark.parametrize("function", FUNCTIONS_OF_QUOTIENTS)
@pytest.mark.parametrize("training", [False, True])
def test_quotients_that_forward_computes_are_captured_at_few(
    function: Callable[[Model, Tensor], Tensor],
    training: bool,
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    torch.manual_seed(0)
    _called(Model(function).train(training), _lengths(40), training)
    assert len(captures) <= 26


class UNet(nn.Module):
    """Down and up again, cut to the size of the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv1d(3, 6, 3, 2, 1), nn.Conv1d(6, 6, 3, 2, 1)
        self.up = nn.ConvTranspose1d(6, 6, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        down = torch.relu(self.down(x))
        up = self.up(torch.relu(self.deep(down)))
        return torch.tanh(torch.cat([down, up[..., : down.shape[-1]]], 1))


@pytest.mark.parametrize("training", [False, True])
def test_crops_to_the_size_of_another_tensor_are_captured_at_few(
    training: bool,
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    torch.manual_seed(0)
    draw = random.Random(0)
    _called(UNet().train(training), [(draw.randint(2, 7), 3, draw.randint(24, 90)) for _ in range(40)], training)
    assert len(captures) <= 22


def chunk_by_another_name(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(CHUNK(m.first(x), 3)[0]).sum(0) * (x.shape[0] // 3)


def every_third_by_hand(m: Model, x: Tensor) -> Tensor:
    kept = [torch.tanh(m.first(step)) for place, step in enumerate(x) if place % 3 == 0]
    return torch.stack(kept) * (x.shape[0] // 3)


def count_of_pieces(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x)[: len(x.tensor_split(list(range(3, x.shape[0], 3))))]) * (x.shape[0] // 3)


CHUNK = torch.chunk


@pytest.mark.sampled
@pytest.mark.parametrize("function", [chunk_by_another_name, every_third_by_hand, count_of_pieces])
@pytest.mark.parametrize("rest", [1, 2])
def test_numbers_that_are_not_followed_are_no_formulas(
    function: Callable[[Model, Tensor], Tensor],
    rest: int,
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    """A third of the length rounded up, which ``forward`` also computes rounded down: one more, unless the length is a
    multiple."""
    torch.manual_seed(0)
    lengths = [n for n in (14, 18, 23, 33, 27, 36, 48, 21, 25, 31, 43, 22, 39, 30) if n % 3 != rest]
    sizes = [(n, b, WIDTH) for b, n in zip((2, 3, 5, 4, 7, 6, 3, 8, 2, 4), lengths, strict=False)]
    _called(Model(function).eval(), [*sizes, (33 + rest, 3, WIDTH), (27 + rest, 4, WIDTH), (39 + rest, 5, WIDTH)])


def last_but_one(m: Model, x: Tensor) -> Tensor:
    starts = list(range(0, x.shape[0], 5))
    return torch.tanh(m.first(x)[: x.shape[0] // 5 * 5 - 5]) * starts[-2]


def count_of_steps(m: Model, x: Tensor) -> Tensor:
    kept = len(x.unbind()[::5])
    return torch.tanh(m.first(x)[: x.shape[0] // 5]) * (kept * 2) * (x.shape[0] // 5 * 2 + 2)


def last_but_one_of_steps(m: Model, x: Tensor) -> Tensor:
    starts = [place for place, _ in enumerate(x)][::5]
    return torch.tanh(m.first(x)[: x.shape[0] // 5 * 5 - 5]) * starts[-2]


@pytest.mark.parametrize("function", [last_but_one, last_but_one_of_steps, count_of_steps])
def test_plain_numbers_from_ranges_and_lists_are_no_constants(
    function: Callable[[Model, Tensor], Tensor],
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    """A fifth of the length rounded up, which ``forward`` also computes rounded down: one more, unless the length is a
    multiple."""
    torch.manual_seed(0)
    draw = random.Random(2)
    lengths = [21, 83, *(n for n in draw.sample(range(21, 84), 20) if n % 5), 80, 50, 60, 75]
    sizes = zip(lengths, [2, 9, 3, 7, *(draw.randint(2, 9) for _ in lengths)], strict=False)
    _called(Model(function).eval(), [(*size, WIDTH) for size in sizes])


def decides_by_a_count(m: Model, x: Tensor) -> Tensor:
    last_but_one = list(range(x.shape[0]))[-2]
    return torch.tanh(m.first(x)) * (x.shape[0] if last_but_one % 5 else x.shape[0] + 1)


def decides_by_a_place(m: Model, x: Tensor) -> Tensor:
    last_but_one = range(x.shape[0])[-2]
    return torch.tanh(m.first(x)) * (x.shape[0] if last_but_one % 5 else x.shape[0] + 1)


def divides_a_count(m: Model, x: Tensor) -> Tensor:
    last_but_one = list(range(x.shape[0]))[-2]
    return torch.tanh(m.first(x)) * (last_but_one // 5 - (last_but_one - 1) // 5 + 2)


@pytest.mark.parametrize("function", [decides_by_a_count, decides_by_a_place, divides_a_count])
def test_a_count_from_the_end_of_a_range_is_no_constant(
    function: Callable[[Model, Tensor], Tensor],
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    """The lengths of all captured calls but the last are no multiples of five and two."""
    torch.manual_seed(0)
    lengths = [23, 85, 31, 44, 60, 71, 53, 28, 79, 35, 67, 42, 57, 77]
    _called(Model(function).eval(), [(n, b, WIDTH) for n, b in zip(lengths, [2, 9, 3, 7, 4, 5, 6] * 2, strict=True)])


def test_a_number_that_was_equal_in_all_calls_is_checked_at_the_first_call_that_is_served(
    captures: list[tuple[int, ...]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The factor is 1 in all captured calls, and 3 for 54 steps and a batch of 5."""
    monkeypatch.setattr("fuse.runtime.engine.reached", lambda maker, new_sizes, call, beyond: beyond)
    torch.manual_seed(0)

    def scaled(first: nn.Conv1d, x: Tensor) -> Tensor:
        y = torch.tanh(F.linear(x, first.weight[:, :, 0])[::3][: (x.shape[0] + 3) // 7])
        return torch.tanh(y * ((y.shape[0] // 8 - y.shape[0] - y.shape[1]) % 7 + 1))

    sizes = [(31, 3), (36, 9), (55, 7), (56, 7), (57, 7), (59, 7), (54, 5)]
    _called(Beside(scaled, 1).eval(), [(*size, 6) for size in sizes])


def test_a_place_in_a_list_is_a_number_that_is_read(
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    """The first and the last layer are the same: their graphs are equal."""
    torch.manual_seed(0)

    def chosen(m: Model, x: Tensor) -> Tensor:
        y = torch.tanh(m.first(x)[: x.shape[0] // 2])
        return [y, y * 2, y][x.shape[0] % 3]

    lengths = [n for n in range(20, 70) if n % 3 != 1]
    random.Random(0).shuffle(lengths)
    sizes = [(n, n % 5 + 2, WIDTH) for n in (*lengths[:12], 34, 40, 46, 52)]
    _called(Model(chosen).eval(), sizes)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(8))
def test_random_layers_at_random_sizes(
    seed: int,
    captures: list[tuple[int, ...]],  # noqa: F811
) -> None:
    assert first_wrong(seed, calls=14) is None


class PaddedToEven(nn.Module):
    """A branch on a size that a padding by zero or one made."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(x, (0, x.shape[1] % 2))
        return torch.relu(y) * 2 if 2 * y.shape[1] > 3 * x.shape[0] else torch.tanh(y)


def test_a_padding_by_one_may_be_none_at_other_sizes(captures: list[tuple[int, ...]]) -> None:  # noqa: F811
    """At (24, 36) the branch is another one than for 37 columns."""
    sizes = [(22, 55), (28, 58), (39, 9), (35, 57), (21, 49), (9, 18), (13, 31), (36, 23), (30, 45), (21, 8), (18, 28)]
    sizes += [(17, 57), (30, 45), (14, 47), (34, 51), (6, 8), (18, 27), (16, 18), (24, 36)]
    _called(PaddedToEven(), sizes)
