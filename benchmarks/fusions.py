"""Ten fusions as patterns, each in six other spellings and with six near misses: what matchers are compared by.

    pattern      F.gelu(F.linear(x, w, b))
    spelling     F.gelu(b + x @ w.t())                 means the same: to be found
    near miss    F.gelu(x @ w.t() + b[:, None])        means something else: not to be rewritten wrongly

The pattern is one plain function of PyTorch for all matchers. What does not apply to a fusion is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SPELLINGS = (
    "operands swapped",
    "method for function",
    "x * (1 / c) for x / c",
    "split, chunk or slices",
    "addmm, mm + add or F.linear",
    "keyword for positional",
)
NEAR_MISSES = (
    "another dim",
    "another constant",
    "an extra user",
    "a mutation between",
    "a dtype change",
    "a broadcast operand",
)

Function = Callable[..., Any]


@dataclass(frozen=True)
class Fusion:
    """One fusion: ``pattern`` is run on tensors of ``shapes``; the other functions take the same arguments."""

    name: str
    pattern: Function
    shapes: tuple[tuple[int, ...], ...]
    spellings: Mapping[str, Function]
    near_misses: Mapping[str, Function]
    positive: tuple[int, ...] = ()

    def arguments(self) -> tuple[Tensor, ...]:
        """Random tensors, those of ``positive`` places without negative elements; equal in each call."""
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(shape, generator=generator) for shape in self.shapes]
        return tuple(tensor.abs() + 0.1 if place in self.positive else tensor for place, tensor in enumerate(made))


def _then(function: Function, change: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    """``function``'s result after ``change`` was made to it."""

    def changed(*arguments: Tensor) -> Tensor:
        result: Tensor = function(*arguments)
        change(result)
        return result

    return changed


# ---- linear + gelu -------------------------------------------------------------------------------------------------


def _linear_then_used(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = F.linear(x, w, b)
    return F.gelu(h), h


LINEAR_GELU = Fusion(
    "linear + gelu",
    lambda x, w, b: F.gelu(F.linear(x, w, b)),
    ((8, 8), (8, 8), (8,)),
    {
        "operands swapped": lambda x, w, b: F.gelu(b + x @ w.t()),
        "method for function": lambda x, w, b: F.gelu(x.matmul(w.t()).add(b)),
        "addmm, mm + add or F.linear": lambda x, w, b: F.gelu(torch.addmm(b, x, w.t())),
        "keyword for positional": lambda x, w, b: F.gelu(input=F.linear(x, weight=w, bias=b), approximate="none"),
    },
    {
        "another dim": lambda x, w, b: F.gelu(x @ w + b),
        "another constant": lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        "an extra user": _linear_then_used,
        "a mutation between": lambda x, w, b: F.gelu(_then(F.linear, lambda h: h.add_(1))(x, w, b)),
        "a dtype change": lambda x, w, b: F.gelu(F.linear(x, w, b).double()),
        "a broadcast operand": lambda x, w, b: F.gelu(x @ w.t() + b[:, None]),
    },
)

# ---- residual tail -------------------------------------------------------------------------------------------------


def _conv(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x, w, b, padding=1)


def _conv_then_used(x: Tensor, w: Tensor, b: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    y = _conv(x, w, b)
    return torch.relu(y + skip), y


RESIDUAL_TAIL = Fusion(
    "residual tail",
    lambda x, w, b, skip: torch.relu(F.conv2d(x, w, b, padding=1) + skip),
    ((1, 4, 6, 6), (4, 4, 3, 3), (4,), (1, 4, 6, 6)),
    {
        "operands swapped": lambda x, w, b, skip: torch.relu(skip + F.conv2d(x, w, b, padding=1)),
        "method for function": lambda x, w, b, skip: _conv(x, w, b).add(skip).relu(),
        "keyword for positional": lambda x, w, b, skip: torch.relu(
            torch.add(F.conv2d(input=x, weight=w, bias=b, stride=1, padding=(1, 1)), other=skip)
        ),
    },
    {
        "another dim": lambda x, w, b, skip: torch.relu(_conv(x, w, b).transpose(2, 3) + skip),
        "another constant": lambda x, w, b, skip: torch.relu(torch.add(_conv(x, w, b), skip, alpha=2)),
        "an extra user": _conv_then_used,
        "a mutation between": lambda x, w, b, skip: torch.relu(_then(_conv, lambda y: y.mul_(2))(x, w, b) + skip),
        "a dtype change": lambda x, w, b, skip: torch.relu(_conv(x, w, b).double() + skip),
        "a broadcast operand": lambda x, w, b, skip: torch.relu(_conv(x, w, b) + skip[:, :1]),
    },
)

# ---- softmax with a scale ------------------------------------------------------------------------------------------


def _scaled_then_used(x: Tensor) -> tuple[Tensor, Tensor]:
    scaled = x / 8
    return torch.softmax(scaled, -1), scaled


SCALED_SOFTMAX = Fusion(
    "softmax with scale",
    lambda x: torch.softmax(x / 8, -1),
    ((8, 8),),
    {
        "operands swapped": lambda x: torch.softmax(0.125 * x, -1),
        "method for function": lambda x: x.div(8).softmax(-1),
        "x * (1 / c) for x / c": lambda x: torch.softmax(x * 0.125, -1),
        "keyword for positional": lambda x: F.softmax(torch.div(x, other=8), dim=1),
    },
    {
        "another dim": lambda x: torch.softmax(x / 8, 0),
        "another constant": lambda x: torch.softmax(x / 4, -1),
        "an extra user": _scaled_then_used,
        "a mutation between": lambda x: torch.softmax(_then(lambda t: t / 8, lambda y: y[0].zero_())(x), -1),
        "a dtype change": lambda x: torch.softmax(x / 8, -1, dtype=torch.float64),
        "a broadcast operand": lambda x: torch.softmax(x / x[:, :1], -1),
    },
)

# ---- layer norm from primitives ------------------------------------------------------------------------------------


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-5) * w + b


def _layer_norm_swapped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return b + w * (centred / torch.sqrt(1e-5 + variance))


def _layer_norm_methods(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x.sub(torch.mean(x, -1, True))
    return centred.div(centred.pow(2).mean(-1, True).add(1e-5).sqrt()).mul(w).add(b)


def _layer_norm_inverse(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * w + b


def _layer_norm_keywords(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = torch.sub(x, other=torch.mean(x, dim=(1,), keepdim=True))
    variance = torch.mean(torch.pow(centred, exponent=2), dim=-1, keepdim=True)
    return torch.add(torch.div(centred, other=torch.sqrt(input=variance + 1e-5)) * w, other=b)


def _layer_norm_with(dim: int, eps: float) -> Function:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        centred = x - x.mean(dim, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(dim, keepdim=True) + eps) * w + b

    return function


def _layer_norm_then_used(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-5) * w + b, variance


def _layer_norm_written(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    centred.add_(1)
    return centred / torch.sqrt(variance + 1e-5) * w + b


def _layer_norm_double(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.double().mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * w + b


LAYER_NORM = Fusion(
    "layer norm from primitives",
    _layer_norm,
    ((8, 8), (8,), (8,)),
    {
        "operands swapped": _layer_norm_swapped,
        "method for function": _layer_norm_methods,
        "x * (1 / c) for x / c": _layer_norm_inverse,
        "keyword for positional": _layer_norm_keywords,
    },
    {
        "another dim": _layer_norm_with(0, 1e-5),
        "another constant": _layer_norm_with(-1, 1e-3),
        "an extra user": _layer_norm_then_used,
        "a mutation between": _layer_norm_written,
        "a dtype change": _layer_norm_double,
        "a broadcast operand": lambda x, w, b: _layer_norm(x, w[:, None], b),
    },
)

# ---- RMS norm ------------------------------------------------------------------------------------------------------


def _rms_with(dim: int, eps: float) -> Function:
    return lambda x, w: x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps) * w


def _rms_then_used(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * scale * w, scale


def _rms_written(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.add_(1)
    return x * scale * w


RMS_NORM = Fusion(
    "RMS norm",
    lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    ((8, 8), (8,)),
    {
        "operands swapped": lambda x, w: w * (torch.rsqrt(1e-6 + x.pow(2).mean(-1, keepdim=True)) * x),
        "method for function": lambda x, w: x.mul(torch.mean(torch.pow(x, 2), -1, True).add(1e-6).rsqrt()).mul(w),
        "x * (1 / c) for x / c": lambda x, w: x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        "keyword for positional": lambda x, w: torch.mul(
            x * torch.rsqrt(input=torch.mean(x.pow(exponent=2), dim=1, keepdim=True) + 1e-6), other=w
        ),
    },
    {
        "another dim": _rms_with(0, 1e-6),
        "another constant": _rms_with(-1, 1e-2),
        "an extra user": _rms_then_used,
        "a mutation between": _rms_written,
        "a dtype change": lambda x, w: x * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        "a broadcast operand": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[:, None],
    },
)

# ---- gated linear unit ---------------------------------------------------------------------------------------------


def _glu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return a * torch.sigmoid(b)


def _glu_by(parts: Callable[[Tensor], tuple[Tensor, ...]], joined: Callable[[Tensor, Tensor], Any]) -> Function:
    return lambda x: joined(*parts(x))


def _halves(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(2, -1)


def _glu_written(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    gate = torch.sigmoid(b)
    a.add_(1)
    return a * gate


def _glu_then_used(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = x.chunk(2, -1)
    gate = torch.sigmoid(b)
    return a * gate, gate


GLU = Fusion(
    "gated linear unit",
    _glu,
    ((16, 16),),
    {
        "operands swapped": _glu_by(_halves, lambda a, b: torch.sigmoid(b) * a),
        "method for function": _glu_by(lambda x: torch.chunk(x, 2, -1), lambda a, b: a.mul(b.sigmoid())),
        "split, chunk or slices": lambda x: x[:, :8] * torch.sigmoid(x[:, 8:]),
        "keyword for positional": _glu_by(
            lambda x: torch.chunk(x, chunks=2, dim=1), lambda a, b: torch.mul(a, other=torch.sigmoid(input=b))
        ),
    },
    {
        "another dim": _glu_by(lambda x: x.chunk(2, 0), lambda a, b: a * torch.sigmoid(b)),
        "another constant": lambda x: x[:, :8] * torch.sigmoid(x[:, 4:12]),
        "an extra user": _glu_then_used,
        "a mutation between": _glu_written,
        "a dtype change": _glu_by(_halves, lambda a, b: a * torch.sigmoid(b.double())),
        "a broadcast operand": _glu_by(_halves, lambda a, b: a * torch.sigmoid(b[:, :1])),
    },
)
