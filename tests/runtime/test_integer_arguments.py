"""Integer arguments that vary are sizes: positions in caches, lengths, bounds; look-ups in tables are not followed."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.runtime import making
from fuse.runtime.sizes import patience

WIDTH, LONGEST = 8, 48


class Model(nn.Module):
    """Calls ``function(self, x, n)``."""

    cache: Tensor
    rows: Tensor

    def __init__(self, function: Callable[[Any, Tensor, int], Any]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(WIDTH, WIDTH)
        self.several = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("cache", torch.zeros(LONGEST, WIDTH))
        self.register_buffer("rows", torch.randn(LONGEST, WIDTH))
        self.scales = [1.0 + (i == 12) for i in range(64)]
        self.steps = [1 + (i == 12) for i in range(64)]
        self.names = {i: "twelve" if i == 12 else "other" for i in range(64)}

    def forward(self, x: Tensor, n: int) -> Any:
        return self.function(self, x, n)


@pytest.fixture(name="captures")
def _captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], int]]:
    """The sizes and the integer of each capture, made-up ones included."""
    made: list[tuple[tuple[int, ...], int]] = []
    own = making.capture_short

    def capture(model: nn.Module, args: tuple[Any, ...], *more: object) -> object:
        made.append((tuple(args[0].shape), args[1]))
        return own(model, args, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(making, "capture_short", capture)
    return made


def made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new size gets its program at its first call."""
    monkeypatch.setattr(patience.Patience, "expected", lambda *_, **__: None)
    monkeypatch.setattr(patience, "AT_ONCE", 1_000_000)


# ---- a decoder -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of new positions to a preallocated cache, which is written in place."""

    def __init__(self, width: int, heads: int, longest: int, buffers: bool) -> None:
        super().__init__()
        self.heads, self.all, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        for name in ("keys", "values"):
            cache = torch.zeros(2, longest, heads, width // heads)
            self.register_buffer(name, cache) if buffers else setattr(self, name, cache)

    def forward(self, x: Tensor, start: int, turns: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.all(x).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k = turned(q, turns), turned(k, turns)
        self.keys[:batch, start : start + length] = k
        self.values[:batch, start : start + length] = v
        keys, values = self.keys[:batch, : start + length], self.values[:batch, : start + length]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask
        return self.out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values).reshape(batch, length, width))


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions."""
    cos, sin = (one[:, None] for one in turns)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Decoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, buffers: bool = True, width: int = 32, heads: int = 2, longest: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Attention(width, heads, longest, buffers) for _ in range(2))
        angles = torch.outer(torch.arange(longest), 0.1 ** torch.arange(width // heads // 2))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        length = tokens.shape[1]
        x, mask = self.embedding(tokens), None
        turns = self.cos[start_pos : start_pos + length], self.sin[start_pos : start_pos + length]
        if length > 1:
            mask = torch.full((length, length), float("-inf")).triu(1)
            mask = torch.hstack([torch.zeros(length, start_pos), mask])
        for layer in self.layers:
            x = x + F.silu(layer(x, start_pos, turns, mask))
        return x @ self.embedding.weight.T


def caches(model: nn.Module) -> list[Tensor]:
    return [getattr(layer, name) for layer in model.layers for name in ("keys", "values")]  # type: ignore[union-attr]


@pytest.mark.parametrize("buffers", [True, False])
def test_a_decoder_with_a_preallocated_cache_is_captured_at_few_positions(
    buffers: bool,
    captures: list[tuple[tuple[int, ...], int]],
    compiled_sources: list[str],
    empty_cache: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler runs for the prompt and for two positions; some are captured as they meet another size."""
    made_at_once(monkeypatch)
    torch.manual_seed(0)
    model = Decoder(buffers).eval()
    other = copy.deepcopy(model)
    fused = fuse.compile(other)
    calls = [(torch.randint(50, (1, 5)), 0), *((torch.randint(50, (1, 1)), at) for at in range(5, 20))]
    compiled = []
    with torch.no_grad():
        for tokens, start in calls:
            before = len(compiled_sources)
            result = fused(tokens, start)
            assert not fused.last_run.fallbacks
            torch.testing.assert_close(result, model(tokens, start), rtol=1e-4, atol=1e-5)
            assert result.stride() == model(tokens, start).stride()
            for mine, eager in zip(caches(other), caches(model), strict=True):
                torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-5)
            if len(compiled_sources) > before:
                compiled.append(start)
    assert compiled == [0, 5, 6]
    assert len(captures) <= 10  # made-up ones included


# ---- functions of an integer -----------------------------------------------------------------------------------------


def start(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(m.rows[n:]).sum(0)


def end(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(m.rows[:n]).relu()


def row(m: Model, x: Tensor, n: int) -> Tensor:
    return x + m.rows[n]


def written(m: Model, x: Tensor, n: int) -> Tensor:
    m.cache[n] = m.first(x[0])
    return m.cache[: n + 1].softmax(0)


def arange(m: Model, x: Tensor, n: int) -> Tensor:
    return x.sum() * torch.sin(torch.arange(n, dtype=x.dtype))


def padded(m: Model, x: Tensor, n: int) -> Tensor:
    return F.pad(m.first(x), (0, 0, n, 0))


def scaled(m: Model, x: Tensor, n: int) -> Tensor:
    return n - m.first(x) * n


def steps(m: Model, x: Tensor, n: int) -> Tensor:
    h = x[0]
    for _ in range(n):
        h = torch.tanh(m.first(h))
    return h


def attended(m: Model, x: Tensor, n: int) -> Tensor:
    keys = m.rows[None, : n + 1]
    return F.scaled_dot_product_attention(x[None, :1], keys, keys)


def and_returned(m: Model, x: Tensor, n: int) -> dict[str, Any]:
    return {"y": m.first(x).relu(), "n": [n, n + 1]}


def long(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x).exp() if n > 20 else m.first(x).tanh()


@pytest.mark.sampled
@pytest.mark.parametrize(
    "function", [start, end, row, written, arange, padded, scaled, steps, attended, and_returned, long]
)
def test_an_integer_is_captured_at_few_values(
    function: Callable[..., Any], captures: list[tuple[tuple[int, ...], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_at_once(monkeypatch)
    values = [9, 30, 14, *random.Random(0).sample(range(4, 40), 17)]
    fused = compared(function, values)
    assert not fused.last_run.fallbacks
    assert len(captures) <= 14


def every_third(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x) * (n % 3)


def seldom(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x) + n // 16 % 2


def twelve(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x).exp() if n == 12 else m.first(x).tanh()


def by_list(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x) * m.scales[n]


def by_tuple(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x).relu() if "aaaaaaaaaaaabaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"[n] == "b" else m.first(x).tanh()


def by_slice_of_a_list(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x) * sum(m.steps[:n])


def by_dictionary(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x).relu() if m.names[n] == "twelve" else m.first(x).tanh()


def by_text(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x).relu() if f"{n}" == "12" else m.first(x).tanh()


def by_format(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x).relu() if "%d" % n == "12" else m.first(x).tanh()  # noqa: UP031  # what is tested


def by_set(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x).relu() if n in {12, 13} else m.first(x).tanh()


@functools.lru_cache
def remembered(n: int) -> float:
    return 2.0 if n == 12 else 1.0


def by_cache(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x) * remembered(n)


def by_bits(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x) * (n & 4)


def by_root(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x) / math.sqrt(n)


def by_tensor(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x) + torch.tensor([n // 4 % 2, 3])[0]


def by_layer(m: Model, x: Tensor, n: int) -> Tensor:
    return m.several[n % 3](x)


def by_layers(m: Model, x: Tensor, n: int) -> Tensor:
    for layer in m.several[: n % 3 + 1]:
        x = layer(x)
    return x


def cubic(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(x) + (n - 8) * (n - 9) * (n - 10)


def turned_around(m: Model, x: Tensor, n: int) -> Tensor:
    return torch.rot90(x[:WIDTH], n, (0, 1)) + 1


def at_end(m: Model, x: Tensor, n: int) -> Tensor:
    return m.first(m.rows[: n + 20]) + m.rows[-n]


ALL = (every_third, seldom, twelve, by_list, by_tuple, by_slice_of_a_list, by_dictionary, by_text, by_format, by_set)
ALL += (by_cache, by_bits, by_root, by_tensor, by_layer, by_layers, cubic, turned_around, at_end)


@pytest.mark.sampled
@pytest.mark.parametrize("function", ALL)
def test_no_value_is_served_wrongly(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first values are alike in what the function looks up, and a later one between them is not."""
    made_at_once(monkeypatch)
    compared(function, [8, 9, 10, 12, 16, 13, 20, 1, 0, 30])


def compared(function: Callable[..., Any], values: list[int]) -> Any:
    """The compiled model, after calls that are compared with eager ones."""
    torch.manual_seed(0)
    model = Model(function).eval()
    other = copy.deepcopy(model)
    fused = fuse.compile(other)
    with torch.no_grad():
        for n in values:
            x = torch.randn(12, WIDTH)
            torch.testing.assert_close(fused(x, n), model(x, n), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(other.cache, model.cache, rtol=1e-4, atol=1e-5)
    return fused
