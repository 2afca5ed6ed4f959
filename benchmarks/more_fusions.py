"""The other four of the ten fusions, of several operators each: :mod:`benchmarks.fusions` says what they are for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fusions import GLU, LAYER_NORM, LINEAR_GELU, RESIDUAL_TAIL, RMS_NORM, SCALED_SOFTMAX, Function, Fusion

# ---- attention -----------------------------------------------------------------------------------------------------


def _weights(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / 8, -1)


def _attention_then_used(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = _weights(q, k)
    return weights @ v, weights


def _attention_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _weights(q, k)
    weights[..., 0].zero_()
    return weights @ v


ATTENTION = Fusion(
    "attention",
    lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) / 8, -1) @ v,
    ((2, 8, 8), (2, 8, 8), (2, 8, 8)),
    {
        "operands swapped": lambda q, k, v: torch.softmax(0.125 * (q @ k.transpose(-2, -1)), -1) @ v,
        "method for function": lambda q, k, v: q.matmul(k.mT).div(8).softmax(-1).matmul(v),
        "x * (1 / c) for x / c": lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) * 0.125, -1) @ v,
        "addmm, mm + add or F.linear": lambda q, k, v: torch.bmm(
            F.softmax(torch.bmm(q, k.permute(0, 2, 1)) / 8, -1), v
        ),
        "keyword for positional": lambda q, k, v: torch.matmul(
            F.softmax(torch.div(torch.matmul(q, other=k.transpose(dim0=1, dim1=2)), other=8), dim=2), other=v
        ),
    },
    {
        "another dim": lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) / 8, -2) @ v,
        "another constant": lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) / 4, -1) @ v,
        "an extra user": _attention_then_used,
        "a mutation between": _attention_written,
        "a dtype change": lambda q, k, v: _weights(q, k).double() @ v.double(),
        "a broadcast operand": lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) / q[..., :1], -1) @ v,
    },
)

# ---- convolution, batch norm, relu ---------------------------------------------------------------------------------


def _normed(y: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    return F.batch_norm(y, mean, var, w, b, False, 0.1, eps)


def _norm_then_used(x: Tensor, k: Tensor, m: Tensor, v: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.conv2d(x, k)
    return torch.relu(_normed(y, m, v, w, b)), y


def _norm_written(x: Tensor, k: Tensor, m: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.conv2d(x, k)
    y.add_(1)
    return torch.relu(_normed(y, m, v, w, b))


CONV_NORM_RELU = Fusion(
    "conv + batch norm + relu",
    lambda x, k, m, v, w, b: torch.relu(F.batch_norm(F.conv2d(x, k), m, v, w, b, False, 0.1, 1e-5)),
    ((1, 4, 6, 6), (4, 4, 3, 3), (4,), (4,), (4,), (4,)),
    {
        "method for function": lambda x, k, m, v, w, b: _normed(F.conv2d(x, k), m, v, w, b).relu(),
        "keyword for positional": lambda x, k, m, v, w, b: F.relu(
            F.batch_norm(F.conv2d(input=x, weight=k, bias=None), running_mean=m, running_var=v, weight=w, bias=b)
        ),
    },
    {
        "another dim": lambda x, k, m, v, w, b: torch.relu(_normed(F.conv2d(x, k).transpose(1, 2), m, v, w, b)),
        "another constant": lambda x, k, m, v, w, b: torch.relu(_normed(F.conv2d(x, k), m, v, w, b, 0.5)),
        "an extra user": _norm_then_used,
        "a mutation between": _norm_written,
        "a dtype change": lambda x, k, m, v, w, b: torch.relu(
            _normed(F.conv2d(x, k).double(), m.double(), v.double(), w.double(), b.double())
        ),
    },
    positive=(3,),
)

# ---- LSTM gates ----------------------------------------------------------------------------------------------------

Parts = Callable[[Tensor], tuple[Tensor, ...]]


def _cell(gates: Tensor, c: Tensor, parts: Parts = lambda gates: gates.chunk(4, 1)) -> tuple[Tensor, Tensor]:
    i, f, g, o = parts(gates)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _lstm(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (torch.addmm(b, x, w) + h @ u).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _lstm_swapped(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (h @ u + torch.addmm(b, x, w)).chunk(4, 1)
    c = torch.tanh(g) * torch.sigmoid(i) + c * torch.sigmoid(f)
    return torch.tanh(c) * torch.sigmoid(o), c


def _lstm_methods(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = b.addmm(x, w).add(h.matmul(u)).chunk(4, 1)
    c = f.sigmoid().mul(c).add(i.sigmoid().mul(g.tanh()))
    return o.sigmoid().mul(c.tanh()), c


def _slices(gates: Tensor) -> tuple[Tensor, ...]:
    return gates[:, :4], gates[:, 4:8], gates[:, 8:12], gates[:, 12:]


def _other_order(gates: Tensor) -> tuple[Tensor, ...]:
    f, i, g, o = gates.chunk(4, 1)
    return i, f, g, o


def _lstm_like(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], parts: Parts | None = None) -> Function:
    """The cell after ``change`` was made to its gates and state."""

    def function(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        gates, state = change(torch.addmm(b, x, w) + h @ u, c)
        return _cell(gates, state, parts) if parts else _cell(gates, state)

    return function


def _lstm_then_used(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    gates = torch.addmm(b, x, w) + h @ u
    return (*_cell(gates, c), gates)


def _lstm_written(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    gates = torch.addmm(b, x, w) + h @ u
    gates[:, :4].mul_(2)
    return _cell(gates, c)


LSTM_GATES = Fusion(
    "LSTM gates",
    _lstm,
    ((4, 4), (4, 4), (4, 4), (4, 16), (4, 16), (16,)),
    {
        "operands swapped": _lstm_swapped,
        "method for function": _lstm_methods,
        "split, chunk or slices": _lstm_like(lambda gates, c: (gates, c), _slices),
        "addmm, mm + add or F.linear": lambda x, h, c, w, u, b: _cell(F.linear(x, w.t(), b) + torch.mm(h, u), c),
        "keyword for positional": lambda x, h, c, w, u, b: _cell(
            torch.addmm(b, mat1=x, mat2=w, beta=1, alpha=1) + torch.matmul(h, other=u),
            c,
            lambda gates: gates.split(split_size=4, dim=1),
        ),
    },
    {
        "another dim": _lstm_like(lambda gates, c: (gates, c), _other_order),
        "another constant": lambda x, h, c, w, u, b: _cell(torch.addmm(b, x, w, beta=2) + h @ u, c),
        "an extra user": _lstm_then_used,
        "a mutation between": _lstm_written,
        "a dtype change": _lstm_like(lambda gates, c: (gates.double(), c)),
        "a broadcast operand": _lstm_like(lambda gates, c: (gates, c[:1])),
    },
)

# ---- cat of slices -------------------------------------------------------------------------------------------------


def _cat(dim: int, end: int) -> Function:
    return lambda x, y: torch.relu(torch.cat([x[:, :end], y[:, end:]], dim))


def _cat_then_used(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    joined = torch.cat([x[:, :4], y[:, 4:]], 1)
    return torch.relu(joined), joined


def _cat_written(x: Tensor, y: Tensor) -> Tensor:
    piece = x[:, :4]
    x.neg_()
    return torch.relu(torch.cat([piece, y[:, 4:]], 1))


CAT_OF_SLICES = Fusion(
    "cat of slices",
    lambda x, y: torch.relu(torch.cat([x[:, :4], y[:, 4:]], 1)),
    ((8, 8), (8, 8)),
    {
        "method for function": lambda x, y: torch.cat((x.narrow(1, 0, 4), y.narrow(1, 4, 4)), -1).relu(),
        "split, chunk or slices": lambda x, y: torch.relu(torch.cat([x.split(4, 1)[0], y.chunk(2, 1)[1]], 1)),
        "keyword for positional": lambda x, y: F.relu(input=torch.cat(tensors=[x[:, :4], y[:, 4:]], dim=-1)),
    },
    {
        "another dim": _cat(0, 4),
        "another constant": _cat(1, 3),
        "an extra user": _cat_then_used,
        "a mutation between": _cat_written,
        "a dtype change": lambda x, y: torch.relu(torch.cat([x[:, :4].double(), y[:, 4:]], 1)),
    },
)

FUSIONS = (
    LINEAR_GELU,
    RESIDUAL_TAIL,
    SCALED_SOFTMAX,
    LAYER_NORM,
    RMS_NORM,
    GLU,
    ATTENTION,
    CONV_NORM_RELU,
    LSTM_GATES,
    CAT_OF_SLICES,
)
