"""Models that read values of tensors: calls of other sizes that read the same values need no capture."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fuse
from fuse.errors import CaptureError
from fuse.graph.numbers.learned import Learned, Learning
from fuse.graph.values.told_values import telling, told_values
from fuse.runtime.sizes import patience
from tests.runtime.test_reaching import captures

WIDTH = 8
LENGTHS = 11, 27, 19, 31, 23, 14, 29, 17, 21, 25

__all__ = ["captures"]  # a fixture


class Reads(nn.Module):
    """A model whose ``forward`` reads whether all elements of ``mask`` are set."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.all():
            return torch.relu(self.one(x)) + 1
        return torch.tanh(self.other(x)) * mask[..., None]


class Steps(Reads):
    """The same in a loop, with a number that is constant."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        masked = not bool((mask == 1).all())
        h, states = torch.zeros_like(x[0]), []
        for t in range(len(x)):
            new = torch.tanh(self.one(x[t]) + self.other(h))
            h = torch.where(mask[t, :, None], new, h) if masked else new
            states.append(h)
        times = int(mask[0, 0].long())
        return torch.stack([state for state in states for _ in range(times)])


class Compares(Reads):
    """A comparison of sizes behind a value that is read, and a number that tensors only are computed from."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x / x.detach().abs().max().item()
        if mask.any() and len(x) > 20:
            x = self.one(x)
        return self.other(x) if mask.all() else self.other(x).cumsum(0)


class Writes(Reads):
    """A write to an argument once the value is known."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.one(x) * mask[..., None].to(x.dtype)
        if mask.all():
            mask.logical_not_()
        return y


class Packed(nn.Module):
    """Packed sequences, of which one is as long as ``x``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, mask.sum(0), enforce_sorted=False)
        result: Tensor = pad_packed_sequence(self.layer(packed)[0])[0]
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a branch": Reads,
    "a loop": Steps,
    "comparisons": Compares,
    "writes": Writes,
    "packed sequences": lambda: Packed(nn.GRU(WIDTH, WIDTH)),
}


def mask_of(length: int, whole: bool = True, batch: int = 3) -> Tensor:
    """The steps of each sequence; the first one is as long as ``length``, and all are if ``whole``."""
    lengths = [length, *(length if whole else length // (2 + number) for number in range(batch - 1))]
    return torch.arange(length)[:, None] < torch.tensor(lengths)


def call(model: nn.Module, double: nn.Module, fused: nn.Module, mask: Tensor, training: bool) -> None:
    """One call, held to that of ``double``, with its gradients in training."""
    x = torch.randn(*mask.shape, WIDTH)
    found, expected = [], []
    for called, of, results in ((fused, model, found), (double, double, expected)):
        given = x.to(next(of.parameters()).dtype, copy=True).requires_grad_(training)
        written = mask.clone()
        of.zero_grad()
        with torch.set_grad_enabled(training):
            result = called(given, written)
        if training:
            result.square().mean().backward()
        results += [result, written, given.grad, *(p.grad for p in of.parameters())]
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)


def fused_of(name: str, training: bool) -> tuple[nn.Module, nn.Module, fuse.FusedModule]:
    model = MODELS[name]().train(training)
    return model, copy.deepcopy(model).double(), fuse.compile(model)


@pytest.mark.sampled
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_calls_that_read_the_same_share_captures(name: str, training: bool, captures: list[tuple[int, ...]]) -> None:
    model, double, fused = fused_of(name, training)
    for length in LENGTHS[:7]:
        call(model, double, fused, mask_of(length), training)
        assert not fused.last_run.fallbacks
        assert fused.last_run.reads
    own = [size for size in captures if size[0] in LENGTHS]  # others are made up, further out
    assert len(own) <= (6 if name == "comparisons" else 2)
    assert fused.compiled.resized


@pytest.mark.sampled
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["a branch", "a loop", "writes"])
def test_other_values_choose_other_graphs(name: str, training: bool, captures: list[tuple[int, ...]]) -> None:
    model, double, fused = fused_of(name, training)
    for number, length in enumerate((*LENGTHS, *LENGTHS[:4])):
        call(model, double, fused, mask_of(length, whole=number % 3 > 0), training)
        assert not fused.last_run.fallbacks
    own = [size for size in captures if size[0] in LENGTHS]
    assert len(own) <= 7  # as many for each value, and those that it takes to see which one a call reads


def test_packed_sequences_share_captures_whatever_their_number(captures: list[tuple[int, ...]]) -> None:
    model, double, fused = fused_of("packed sequences", False)
    sizes = [(9, 3), (14, 6), (11, 4), (16, 7), (13, 5), (10, 6), (12, 4)]
    for length, batch in sizes:
        call(model, double, fused, mask_of(length, False, batch), False)
        assert not fused.last_run.fallbacks
    assert fused.compiled.resized
    assert len([size for size in captures if size[:2] in sizes]) <= 4


def test_sizes_beyond_those_that_read_the_same_are_captured_once(captures: list[tuple[int, ...]]) -> None:
    """A made-up call that reads what such calls read extends their range, below and above."""
    model, double, fused = fused_of("a branch", False)
    for length in LENGTHS[:4]:
        call(model, double, fused, mask_of(length, whole=False), False)
    for length in (27, 31, 29, 11, 49, 13, 24, 45):
        call(model, double, fused, mask_of(length), False)
        assert not fused.last_run.fallbacks
    assert [size[0] for size in captures].count(11) == 1


def test_a_size_whose_values_no_graph_has_waits_for_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that reads another value than all others runs eager at first, as a size without graphs would."""
    model, double, fused = fused_of("a branch", False)
    for length in LENGTHS:
        call(model, double, fused, mask_of(length), False)
    monkeypatch.setattr(patience, "SETTLED", 1)
    call(model, double, fused, mask_of(LENGTHS[-1], whole=False), False)
    assert "a value that forward reads" in fused.last_run.fallbacks[0].reason
    call(model, double, fused, mask_of(LENGTHS[-1]), False)
    assert not fused.last_run.fallbacks


def test_other_models_are_not_told_what_a_model_read() -> None:
    """Patterns are recorded while a made-up call is."""
    model, read = Reads(), Learned("model.py:3", "truth", 0, None, True)
    with telling(model, Learning(1, (read,), ())):
        assert told_values(Reads()) is None
        told = told_values(model)
        assert told is not None
        assert told.next("truth", "model.py:3") is True
        with pytest.raises(CaptureError, match=r"at model\.py:5"):
            told.next("truth", "model.py:5")
    assert told_values(model) is None
