"""Calls whose sizes vary: right at every size, and compiled for few of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.kernel import lower
from fuse.kernel.sizes.sized import call_at_hand
from fuse.runtime.autograd.training import RewrittenGraphs, Training
from fuse.runtime.guards.call_keys import kind_of_sizes
from fuse.runtime.module import Fused
from fuse.runtime.sizes.varying import SizesSeen


class Plain(nn.Module):
    """Two layers, a residual and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.norm(self.narrow(F.gelu(self.wide(x))) + x), -1)


class Attention(nn.Module):
    """Causal attention, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        steps, batch, _ = x.shape
        q, k, v = self.all(x).view(steps, batch, 3, 2, 8).permute(2, 1, 3, 0, 4)
        later = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-1, -2) / 3).masked_fill(later, float("-inf")).softmax(-1)
        return self.out((weights @ v).permute(2, 0, 1, 3).reshape(steps, batch, 16))


class Windows(nn.Module):
    """Windows of 8 steps, the last one padded."""

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % 8))
        windows = padded.view(-1, 8, *x.shape[1:])
        return (windows - windows.mean(1, keepdim=True)).reshape(padded.shape)[: x.shape[0]]


class Convolution(nn.Module):
    """A convolution over time, and a mean over it."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.over_time(x.permute(1, 2, 0))).mean(-1)


class Branch(nn.Module):
    """Another formula for long inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.shape[0] > 20 else torch.sigmoid(x) * x.shape[0]


class Divided(nn.Module):
    """A mean by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0) * (1 / x.shape[0]) - x[-1]


class Several(nn.Module):
    """As many results as there are steps."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.exp(step) for step in x)


class Recurrent(nn.Module):
    """A gated cell over time."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.state = nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        h, states = x.new_zeros(x.shape[1], 16), []
        for step in x:
            update, new = (self.given(step) + self.state(h)).chunk(2, -1)
            h = h + torch.sigmoid(update) * (torch.tanh(new) - h)
            states.append(h)
        return torch.stack(states)


class NormedRecurrent(nn.Module):
    """A cell with a norm in it, whose rows are shared out."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, states = x.new_zeros(x.shape[1], 16), []
        for step in x:
            h = torch.tanh(self.norm(self.cell(h) + step))
            states.append(h)
        return torch.stack(states, 1), h


class OtherDimension(nn.Module):
    """Another dimension for long inputs: these are numbers, but no sizes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dim = 2 if x.shape[0] > 20 else 3
        parts = x.view(*x.shape[:2], 4, 4).tanh()
        first = torch.zeros(*x.shape[:2], 2, 2, dtype=torch.int64)
        return parts.flip(dim), parts.gather(dim, first)


class Masked(nn.Module):
    """A mask that is looked up by two tensors of positions, and positions that are compared with a size."""

    def forward(self, x: Tensor) -> Tensor:
        steps, batch, _ = x.shape
        mask, at = x[..., 0].t() > 0, torch.arange(steps)
        seen = mask[torch.arange(batch)[:, None], at[None]] & (at != steps - 1)
        return torch.where(seen.t()[..., None], x, -1.0)


pytestmark = pytest.mark.usefixtures("captured_at_once")

MODELS: list[Callable[[], nn.Module]] = [
    Plain,
    Attention,
    Windows,
    Convolution,
    Branch,
    Divided,
    Several,
    Recurrent,
    NormedRecurrent,
    OtherDimension,
    Masked,
]


def shapes(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Random lengths and batch sizes, some of them 1."""
    numbers = random.Random(seed)
    return [(numbers.randint(2, 40), numbers.randint(1, 6)) for _ in range(count)]


def assert_right(model: nn.Module, fused: Fused, inputs: Sequence[Tensor]) -> None:
    """Results like eager's, against float64."""
    double = type(model)().double()
    double.load_state_dict(model.state_dict())
    for x in inputs:
        got, eager, reference = (_several(one) for one in (fused(x), model(x), double(x.double())))
        assert not fused.last_run.fallbacks
        for one, other, expected in zip(got, eager, reference, strict=True):
            torch.testing.assert_close(one.double(), expected, rtol=1e-4, atol=1e-5)
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())


def _several(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


@pytest.mark.sampled
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_results_are_right_at_every_size(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        assert_right(model, fuse.compile(model), [torch.randn(*shape, 16) for shape in shapes(10)])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "make", [Plain, Attention, Convolution, Recurrent, NormedRecurrent, Masked], ids=lambda make: make.__name__
)
def test_the_compiler_runs_for_few_of_many_sizes(
    make: Callable[[], nn.Module], compiled_sources: list[str], empty_cache: Path
) -> None:
    model = make().eval()
    fused = fuse.compile(model)
    compiling = 0
    with torch.no_grad():
        for steps, batch in [(5, 3), (9, 4), (33, 6), (17, 2), (12, 5), (40, 3), (6, 6), (25, 2)]:
            before = len(compiled_sources)
            fused(torch.randn(steps, batch, 16))
            compiling += len(compiled_sources) > before
    assert compiling <= 4


@pytest.mark.parametrize("make", [Plain, Convolution], ids=lambda make: make.__name__)
def test_the_compiler_runs_for_a_batch_of_one_and_for_all_others(
    make: Callable[[], nn.Module], compiled_sources: list[str], empty_cache: Path
) -> None:
    model = make().eval()
    fused = fuse.compile(model)
    compiling = []
    with torch.no_grad():
        for batch in (1, 4, 7, 3, 9):
            before, x = len(compiled_sources), torch.randn(20, batch, 16)
            torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
            compiling.append(len(compiled_sources) > before)
    assert compiling == [True, True, False, False, False]


def test_a_loop_of_which_only_the_length_varies_is_compiled_once(
    compiled_sources: list[str], empty_cache: Path
) -> None:
    class OnlyHere(nn.Module):  # what calls of other tests teach of a line's sizes would count, too
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[1], 16)
            for step in x:
                h = torch.tanh(self.cell(h) + step)
            return h

    torch.manual_seed(0)
    model = OnlyHere().eval()
    fused = fuse.compile(model)
    loops = []
    with torch.no_grad():
        for steps, batch in [(5, 3), (9, 3), (33, 3), (9, 4), (17, 5)]:
            assert_right(model, fused, [torch.randn(steps, batch, 16)])
            loops.append(sum('extern "C" int loop_' in source for source in compiled_sources))
    assert loops == [1, 1, 1, 2, 2]


def test_training_is_right_at_every_size() -> None:
    torch.manual_seed(0)
    model = Plain()
    fused = fuse.compile(model)
    double = Plain().double()
    double.load_state_dict(model.state_dict())
    for shape in shapes(6):
        x = torch.randn(*shape, 16)
        for one, values in ((fused, x), (double, x.double())):
            one.zero_grad()
            one(values).square().mean().backward()
        for (name, parameter), reference in zip(model.named_parameters(), double.parameters(), strict=True):
            assert parameter.grad is not None
            assert reference.grad is not None
            torch.testing.assert_close(parameter.grad.double(), reference.grad, rtol=1e-3, atol=1e-6, msg=name)


class Updates(nn.Module):
    """Writes two of its inputs, of layouts apart, in one launch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.copy_(y.t() * 2)
        y.mul_(3)
        return x.sum()


def test_gradients_of_some_results_are_compiled_for_few_of_many_sizes(
    compiled_sources: list[str], empty_cache: Path
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.first(x)) * 2
            return torch.softmax(h, -1), torch.sigmoid(self.second(h))

    fused = fuse.compile(Two())
    for number, size in enumerate((5, 7, 9, 6)):
        before = len(compiled_sources)
        fused(torch.randn(size, 16))[1].square().sum().backward()
        assert not fused.last_run.fallbacks
        assert number < 2 or len(compiled_sources) == before, size


def test_inputs_are_written_at_every_size() -> None:
    fused = fuse.compile(Updates())
    for rows, columns in [(5, 3), (7, 4), (300, 20), (9, 9), (2, 6), (1, 4)]:
        x, y = torch.randn(rows, columns), torch.randn(columns, rows)
        expected_x, expected_y = x.clone(), y.clone()
        with torch.no_grad():
            fused(x, y)
            Updates()(expected_x, expected_y)
        torch.testing.assert_close((x, y), (expected_x, expected_y))


class Joined(nn.Module):
    """Its gradients are slices of one tensor."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.tanh(), y * 2]).softmax(0)


def test_sizes_that_are_equal_once_differ_later() -> None:
    fused = fuse.compile(Joined())
    for one, other in [(5, 3), (7, 4), (40, 40), (64, 64), (9, 30), (30, 9)]:
        given = [torch.randn(rows, 5, requires_grad=True) for rows in (one, other)]
        double = [x.detach().double().requires_grad_() for x in given]
        for model, values in ((fused, given), (Joined(), double)):
            result = model(*values)
            (result * torch.arange(result.numel()).view(result.shape)).sum().backward()
        for x, reference in zip(given, double, strict=True):
            assert x.grad is not None
            assert reference.grad is not None
            torch.testing.assert_close(x.grad.double(), reference.grad, rtol=1e-3, atol=1e-3)


def test_lazily_negated_tensors_are_read_as_such_at_every_size() -> None:
    class Imaginary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x.conj().imag * 2 + 1)

    fused = fuse.compile(Imaginary())
    for rows, columns in [(5, 3), (7, 4), (9, 6), (2, 30)]:
        x = torch.randn(rows, columns, dtype=torch.complex64)
        torch.testing.assert_close(fused(x), Imaginary()(x))


def _varying(seen: SizesSeen, leaves: list[Tensor]) -> frozenset[int] | None:
    return seen.varying(kind_of_sizes(leaves, None), leaves)


def test_a_size_varies_once_calls_differ_in_it() -> None:
    seen = SizesSeen()
    assert _varying(seen, [torch.empty(5, 3, 16)]) is None
    assert _varying(seen, [torch.empty(7, 3, 16)]) == frozenset({7})
    assert _varying(seen, [torch.empty(7, 4, 16)]) == frozenset({7, 4})


def test_a_size_that_is_one_or_none_tells_nothing_and_calls_of_another_kind_do_not_vary() -> None:
    seen = SizesSeen()
    assert _varying(seen, [torch.empty(0, 3, 16)]) is None
    assert _varying(seen, [torch.empty(1, 3, 16)]) == frozenset()
    assert _varying(seen, [torch.empty(7, 3, 16)]) == frozenset({7})
    assert _varying(seen, [torch.empty(1, 3, 16)]) == frozenset()
    assert _varying(seen, [torch.empty(8, 3, 16, dtype=torch.float64)]) is None
    assert _varying(seen, [torch.empty(8, 3)]) is None


def test_the_taps_of_a_window_are_no_sizes() -> None:
    class Pools(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.adaptive_avg_pool2d(x.relu(), y.shape[-2:]) + y * 2

    fused = fuse.compile(Pools())
    for h, w, a, b in [(8, 10, 4, 5), (16, 12, 8, 6), (20, 14, 10, 7), (20, 12, 5, 12), (4, 28, 4, 7)]:
        x, y = torch.randn(1, 2, h, w), torch.randn(1, 2, a, b)
        torch.testing.assert_close(fused(x, y), Pools()(x, y))


class Rude:
    """An argument that must not be printed."""

    scale = 2.0

    def __repr__(self) -> str:
        raise AssertionError("printed")


def test_no_code_of_an_argument_runs_while_calls_are_counted() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, rude: Rude) -> Tensor:
            return torch.tanh(x) * rude.scale

    fused, rude = fuse.compile(Scaled()), Rude()
    for size in (3, 5, 8, 3, 11, 13, 17, 19, 23, 29, 31, 37):
        x = torch.randn(size, 4)
        torch.testing.assert_close(fused(x, rude), torch.tanh(x) * 2)


@pytest.mark.parametrize("varies", [False, True])
def test_layers_share_what_is_lowered(varies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Layers(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Plain() for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def lowered(count: int) -> int:
        with monkeypatch.context() as patched:
            made: list[object] = []
            own = lower._lower
            patched.setattr(lower, "_lower", lambda region, *rest: made.append(region) or own(region, *rest))
            patched.setattr(lower, "_KERNELS", {})
            patched.setattr(lower, "_TEXTS", {})
            fused = fuse.compile(Layers(count).eval())
            for length in (19, 23) if varies else (19,):
                fused(torch.randn(length, 5, 16))
            return len(made)

    few = lowered(3)
    assert few
    assert lowered(6) == few


class Heads(nn.Module):
    """Two results of different widths, whose backward passes differ in numbers only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 20), nn.Linear(24, 28)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.first(x)).exp(), torch.tanh(self.second(x)).exp()


def test_each_backward_graph_of_a_call_counts_regions_from_the_end_of_the_forward_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls that expect one loss from the start have one backward graph, whose regions are compared with these."""
    counted: list[object] = []
    own = Training._rewritten_backward

    def rewritten(training: Training, missing: frozenset[int]) -> RewrittenGraphs:
        call = call_at_hand()
        assert call is not None
        counted.append({text: list(numbers) for text, numbers in call.numbers.items()})
        return own(training, missing)

    monkeypatch.setattr(Training, "_rewritten_backward", rewritten)
    first, second = fuse.compile(Heads())(torch.randn(23, 24, requires_grad=True))
    (first.sum() + second.sum()).backward(retain_graph=True)
    for result in (first, second):
        result.sum().backward(retain_graph=True)
    assert len(counted) == 3
    assert counted[0]
    assert counted == counted[:1] * 3
