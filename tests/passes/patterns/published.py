"""What the patterns of the library are for: small copies of published structures, as their authors spell them.

Each has what a pattern must be found in, arguments, and near misses: the same but for one thing, which must not match.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]


@dataclass(frozen=True)
class Published:
    """One structure: ``where`` it is from, what it computes, of what, and what is almost it."""

    where: str
    function: Function
    arguments: tuple[Tensor, ...]
    near: tuple[Function, Function]


_GENERATOR = torch.Generator().manual_seed(0)


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_GENERATOR)


def p(*shape: int) -> Tensor:
    """Positive numbers."""
    return torch.rand(*shape, generator=_GENERATOR) + 0.1


def ids(limit: int, *shape: int) -> Tensor:
    return torch.randint(limit, shape, generator=_GENERATOR)


def mask(*shape: int) -> Tensor:
    return r(*shape) > 0


X, ROW, OTHER = r(2, 5, 16), r(16), r(2, 5, 16)
HEADS = (r(2, 4, 6, 8), r(2, 4, 6, 8), r(2, 4, 6, 8))
IMAGE = r(2, 8, 6, 6)


# ---- activations ---------------------------------------------------------------------------------------------------


def gpt2_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


# ---- norms ---------------------------------------------------------------------------------------------------------


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + 1e-6))


def llama_residual(x: Tensor, skip: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = skip + x
    return weight * (hidden / torch.sqrt(hidden.square().mean(-1, True) + 1e-5)), hidden


def annotated_norm(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return a * (x - mean) / torch.sqrt(variance + 1e-6) + b


def annotated_norm_of_sum(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    centred = x - x.sum(-1, keepdim=True)
    return a * (centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)) + b


def style_norm(x: Tensor) -> Tensor:
    centred = x - torch.mean(x, dim=[2, 3], keepdim=True)
    return centred * torch.rsqrt(torch.mean(torch.square(centred), dim=[2, 3], keepdim=True) + 1e-8)


def mean_norm(x: Tensor, dims: tuple[int, ...], power: int = 2) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred / torch.sqrt(centred.pow(power).mean((2, 3), keepdim=True) + 1e-5)


# ---- attention -----------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, scores: Function, dim: int = -1) -> Tensor:
    weights = F.softmax(scores(torch.matmul(q, k.transpose(-1, -2))), dim=dim)
    return torch.matmul(weights, v)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    batch, heads, length, size = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


def grouped(q: Tensor, k: Tensor, v: Tensor, spread: Function = repeat_kv) -> Tensor:
    return attention(q, spread(k, 2), spread(v, 2), lambda s: s / math.sqrt(8))


def tiled_kv(x: Tensor, times: int) -> Tensor:
    return x.repeat(1, times, 1, 1)


def cached(q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, dim: int = 2) -> tuple[Tensor, ...]:
    k, v = torch.cat([past_k, k], dim=dim), torch.cat([past_v, v], dim=dim)
    return attention(q, k, v, lambda s: s * 0.125), k, v


def cached_twice_scaled(q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
    return attention(q, k, v, lambda s: torch.relu(s) * 0.125), k, v


def linear_attention(q: Tensor, k: Tensor, v: Tensor, feature: Function = lambda x: F.elu(x) + 1) -> Tensor:
    q, k = feature(q), feature(k)
    return torch.matmul(q, torch.matmul(k.transpose(-1, -2), v)) / (
        q @ k.sum(-2, keepdim=True).transpose(-1, -2) + 1e-6
    )


# ---- positions -----------------------------------------------------------------------------------------------------


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_every_two(x: Tensor) -> Tensor:
    x1, x2 = x[:, :, :, ::2], x[:, :, :, 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def rotate_back(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x2, -x1), dim=-1)


def turned_back(x: Tensor) -> Tensor:
    return torch.stack((x[..., 1::2], -x[..., ::2]), dim=-1).flatten(-2)


def bert_embeddings(words: Tensor, a: Tensor, at: Tensor, b: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(at, b) + F.embedding(words, a), (16,), weight, bias, 1e-12)


def alibi(scores: Tensor, slopes: Tensor, places: Tensor, sign: int = 1) -> Tensor:
    distance = sign * (places.unsqueeze(0) - places.unsqueeze(1)).float()
    return torch.softmax(slopes.view(-1, 1, 1) * distance + scores, dim=-1)


# ---- images --------------------------------------------------------------------------------------------------------


def squeeze_excite(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, act: Function = F.relu) -> Tensor:
    gate = F.conv2d(act(F.conv2d(x.mean((2, 3), keepdim=True), a, b)), c, d)
    return torch.sigmoid(gate) * x


def depth_to_space(x: Tensor, order: tuple[int, ...] = (0, 1, 4, 2, 5, 3)) -> Tensor:
    n, c, h, w = x.shape
    return F.relu(x.view(n, c // 4, 2, 2, h, w).permute(*order).reshape(n, c // 4, h * 2, w * 2))


def shuffle(x: Tensor, y: Tensor, groups: int = 2) -> Tensor:
    whole = torch.cat([x, y], dim=1)
    n, c, h, w = whole.shape
    return whole.reshape(n, groups, c // groups, h, w).permute(0, 2, 1, 3, 4).flatten(1, 2) * 2


# ---- losses --------------------------------------------------------------------------------------------------------


def smoothed(logits: Tensor, target: Tensor, dim: int = -1, take: Function = torch.mean) -> Tensor:
    logs = torch.log_softmax(logits, dim)
    nll = -logs.gather(dim=-1, index=target.unsqueeze(1)).squeeze(1)
    return -take(logs, -1) * 0.1 + 0.9 * nll


def focal(logits: Tensor, target: Tensor, reached: Function) -> Tensor:
    prob = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return ce * ((1 - reached(prob, target)) ** 2)


def reached(prob: Tensor, target: Tensor) -> Tensor:
    return prob * target + (1 - prob) * (1 - target)


def jensen_shannon(x: Tensor, y: Tensor, beta: float = 0.5, rest: float = 0.5) -> Tensor:
    p_, q = x.exp(), y.exp()
    log_m = torch.log(beta * q + rest * p_)
    return torch.sum(beta * (q * (y - log_m)) + rest * (p_ * (x - log_m)), -1)


def crf_normaliser(x: Tensor, power: Function = torch.exp, dim: int = 1) -> Tensor:
    top = x.amax(dim, keepdim=True)
    return torch.log(power(x - top).sum(dim)) + top.squeeze(dim)


# ---- cells ---------------------------------------------------------------------------------------------------------


def lstm(gates: Tensor, c: Tensor, new: Function = torch.tanh) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    c = i.sigmoid() * new(g) + f.sigmoid() * c
    return o.sigmoid() * c.tanh(), c


def gru(x: Tensor, h: Tensor, state: Tensor, new: Function = torch.tanh, keep: Function = lambda z: 1 - z) -> Tensor:
    xr, xz, xn = x.split(8, dim=-1)
    hr, hz, hn = h.split(8, dim=-1)
    z = (xz + hz).sigmoid()
    return keep(z) * new((xr + hr).sigmoid() * hn + xn) + state * z


def augru(z: Tensor, new: Tensor, attention: Tensor, state: Tensor, act: Function = torch.tanh) -> Tensor:
    z = torch.sigmoid(z) * (1 - attention)
    return (1 - z) * act(new) + z * state


def augru_without_gate(z: Tensor, new: Tensor, attention: Tensor, state: Tensor) -> Tensor:
    z = torch.sigmoid(z) * attention
    return (1 - z) * torch.tanh(new) + z * state


def peephole(gates: Tensor, c: Tensor, wi: Tensor, wf: Tensor, wo: Tensor, late: bool = True) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.split(8, 1)
    new = torch.sigmoid(wf * c + f) * c + torch.sigmoid(wi * c + i) * torch.tanh(g)
    return torch.sigmoid(wo * (new if late else c) + o) * torch.tanh(new), new


def peephole_relu(gates: Tensor, c: Tensor, wi: Tensor, wf: Tensor, wo: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.split(8, 1)
    new = torch.sigmoid(wf * c + f) * c + torch.sigmoid(wi * c + i) * torch.relu(g)
    return torch.sigmoid(wo * new + o) * torch.tanh(new), new


def norm_lstm(gates: Tensor, c: Tensor, w: Tensor, b: Tensor, out: Function = torch.tanh) -> tuple[Tensor, Tensor]:
    i, f, g, o = torch.chunk(gates, 4, dim=1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * out(F.layer_norm(c, [8], w, b)), c


def norm_lstm_without_bias(gates: Tensor, c: Tensor, w: Tensor, _b: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = torch.chunk(gates, 4, dim=1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(F.layer_norm(c, [8], w)), c


def light_gru(gates: Tensor, h: Tensor, act: Function = F.relu, keep: Function = lambda z: 1 - z) -> Tensor:
    at, zt = gates.chunk(2, 1)
    zt = torch.sigmoid(zt)
    return zt * h + keep(zt) * act(at)


# ---- sequences -----------------------------------------------------------------------------------------------------


def crf_step(score: Tensor, transitions: Tensor, emission: Tensor, kept: Tensor, dim: int = 1) -> Tensor:
    following = score.unsqueeze(2) + transitions + emission.unsqueeze(1)
    return torch.where(kept.unsqueeze(1), torch.logsumexp(following, dim=dim), score)


def crf_step_of_max(score: Tensor, transitions: Tensor, emission: Tensor, kept: Tensor) -> Tensor:
    following = score.unsqueeze(2) + transitions + emission.unsqueeze(1)
    return torch.where(kept.unsqueeze(1), torch.amax(following, dim=1), score)


def viterbi(score: Tensor, transitions: Tensor, emission: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    best, before = (score.unsqueeze(2) + transitions + emission.unsqueeze(1)).max(dim=dim)
    return best, before


def mamba(h: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor, decay: Function = torch.exp) -> Any:
    h = h * decay(dt.unsqueeze(-1) * a) + (dt * x).unsqueeze(-1) * b.unsqueeze(1)
    return torch.sum(h * c.unsqueeze(1), dim=-1), h


def mamba_without_step(h: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Any:
    h = h * torch.exp(dt.unsqueeze(-1) * a) + x.unsqueeze(-1) * b.unsqueeze(1)
    return torch.sum(h * c.unsqueeze(1), dim=-1), h


# ---- experts and eight bits ----------------------------------------------------------------------------------------


def mixtral(logits: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    routing, selected = torch.topk(F.softmax(logits, dim=dim), 2, dim=-1)
    return routing / routing.sum(dim=-1, keepdim=True), selected


def unnormalised(logits: Tensor) -> tuple[Tensor, Tensor]:
    routing, selected = torch.topk(F.softmax(logits, dim=-1), 2, dim=-1)
    return routing * 2, selected


def deepseek(logits: Tensor, correction: Tensor, act: Function = torch.sigmoid) -> tuple[Tensor, Tensor]:
    scores = act(logits)
    _, chosen = torch.topk(scores + correction[None], k=2, dim=-1)
    weights = scores.gather(1, chosen)
    return weights / weights.sum(dim=-1, keepdim=True), chosen


def deepseek_corrected(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits) + correction
    _, chosen = torch.topk(scores, k=2, dim=-1)
    weights = scores.gather(1, chosen)
    return weights / weights.sum(dim=-1, keepdim=True), chosen


def token_quantise(x: Tensor, dim: int = -1, most: int = 127) -> tuple[Tensor, Tensor]:
    scale = torch.clamp(torch.amax(torch.abs(x), dim=dim, keepdim=True), min=1e-5) / most
    return (x / scale).round().to(torch.int8), scale


def norm_quantise(x: Tensor, w: Tensor, scale: Tensor, most: int = 127, near: Function = torch.round) -> Tensor:
    y = w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
    return near(y / scale).clamp(-128, most).to(torch.int8)


CONV = (IMAGE, r(16, 8, 3, 3))
LOGS = (r(4, 16).log_softmax(-1), r(4, 16).log_softmax(-1))
GATES, STATE = r(3, 32), r(3, 8)
CHAIN = (r(3, 5), r(5, 5), r(3, 5))
SCAN = (r(3, 5, 4), p(3, 5), -p(5, 4), r(3, 4), r(3, 4), r(3, 5))

PUBLISHED: dict[str, Published] = {
    "ErfGelu": Published(
        "BERT's first code",
        lambda x: x * 0.5 * (1.0 + torch.erf(x * 2**-0.5)),
        (X,),
        (lambda x: x * 0.5 * (1.0 + torch.erf(x)), lambda x: x * 0.5 * (2.0 + torch.erf(x * 2**-0.5))),
    ),
    "TanhGelu": Published(
        "GPT-2",
        gpt2_gelu,
        (X,),
        (
            lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.04 * x**3))),
            lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**2))),
        ),
    ),
    "BiasGelu": Published(
        "BERT's intermediate layer",
        lambda x, b: F.gelu(b + x),
        (X, ROW),
        (lambda x, b: F.gelu(x * b), lambda x, b: F.silu(x + b)),
    ),
    "QuickGelu": Published(
        "CLIP",
        lambda x: x * torch.sigmoid(1.702 * x),
        (X,),
        (lambda x: x * torch.tanh(1.702 * x), lambda x: x * torch.sigmoid(1.702 + x)),
    ),
    "SquaredRelu": Published(
        "Primer",
        lambda x: torch.pow(F.relu(x), 2),
        (X,),
        (lambda x: torch.pow(F.relu(x), 3), lambda x: torch.square(torch.tanh(x))),
    ),
    "HardSwish": Published(
        "MobileNet V3",
        lambda x: x * torch.clamp(x + 3.0, 0, 6) / 6.0,
        (X,),
        (lambda x: x * F.relu6(x + 2) / 6, lambda x: x * torch.clamp(x + 3, 0, 5) / 6),
    ),
    "HardSigmoid": Published(
        "MobileNet V3's gate",
        lambda x: F.relu6(x + 3.0) / 6.0 + 1,
        (X,),
        (lambda x: F.relu6(x + 3) / 5, lambda x: F.relu6(x * 3) / 6),
    ),
    "Mish": Published(
        "YOLO v4",
        lambda x: x * F.softplus(x).tanh(),
        (X,),
        (lambda x: x * torch.sigmoid(F.softplus(x)), lambda x: x * torch.tanh(F.softplus(x, beta=2))),
    ),
    "DynamicTanh": Published(
        "Transformers without normalisation",
        lambda x, a, g, b: torch.tanh(x * a) * g + b,
        (X, p(1), ROW, ROW + 1),
        (lambda x, a, g, b: torch.tanh(x + a) * g + b, lambda x, a, g, b: torch.sigmoid(x * a) * g + b),
    ),
    "GluOfHalves": Published(
        "the gated convolutions of WaveNet's kin",
        lambda x: x[..., :8] * torch.sigmoid(x[..., 8:]),
        (X,),
        (lambda x: x[..., :8] * torch.tanh(x[..., 8:]), lambda x: x[..., :6] * torch.sigmoid(x[..., 8:14])),
    ),
    "SiluAndMul": Published(
        "Llama with one product",
        lambda x: F.silu(x[..., :8]) * x[..., 8:],
        (X,),
        (lambda x: F.relu(x[..., :8]) * x[..., 8:], lambda x: F.silu(x[..., :8]) + x[..., 8:]),
    ),
    "GeluAndMul": Published(
        "Gemma with one product",
        lambda x: F.gelu(x[..., :8], approximate="tanh") * x[..., 8:],
        (X,),
        (lambda x: F.silu(x[..., :8]) * x[..., 8:], lambda x: F.gelu(x[..., 8:]) * x[..., 8:]),
    ),
    "GatedGelu": Published(
        "Gemma",
        lambda gate, up: up * F.gelu(gate, approximate="tanh"),
        (X, OTHER),
        (lambda gate, up: up * F.gelu(gate), lambda gate, up: up + F.gelu(gate, approximate="tanh")),
    ),
    "GatedSilu": Published(
        "Llama",
        lambda gate, up: torch.sigmoid(gate) * gate * up,
        (X, OTHER),
        (lambda gate, up: torch.tanh(gate) * gate * up, lambda gate, up: F.silu(gate) - up),
    ),
    "BiasSplitGelu": Published(
        "Stable Diffusion's feed-forward",
        lambda x, b: (x + b)[..., :8] * F.gelu((x + b)[..., 8:]),
        (X, ROW),
        (
            lambda x, b: (x + b)[..., 8:] * F.gelu((x + b)[..., :8]),
            lambda x, b: (x * b)[..., :8] * F.gelu((x * b)[..., 8:]),
        ),
    ),
    "RmsNorm": Published(
        "Llama",
        llama_norm,
        (X, ROW),
        (
            lambda x, w: w * (x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-6)),
            lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),
        ),
    ),
    "AddRmsNorm": Published(
        "Llama's residual connections",
        llama_residual,
        (X, OTHER, ROW),
        (
            lambda x, s, w: (w * (x * torch.rsqrt((x + s).pow(2).mean(-1, keepdim=True) + 1e-6)), x + s),
            lambda x, s, w: (w * ((x - s) * torch.rsqrt((x - s).pow(2).mean(-1, keepdim=True) + 1e-6)), (x - s) * 2),
        ),
    ),
    "GemmaRmsNorm": Published(
        "Gemma",
        lambda x, w: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * (1.0 + w),
        (X, ROW),
        (
            lambda x, w: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * (2.0 + w),
            lambda x, w: (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)) * (1.0 + w),
        ),
    ),
    "LayerNormWrittenOut": Published(
        "Megatron's first layer norm",
        lambda x, a, b: (
            a * ((x - x.mean(-1, True)) / torch.sqrt(((x - x.mean(-1, True)) ** 2).mean(-1, True) + 1e-6)) + b
        ),
        (X, ROW, ROW + 1),
        (
            annotated_norm_of_sum,
            lambda x, a, b: a * ((x - x.mean(-1, True)) / ((x - x.mean(-1, True)).pow(2).mean(-1, True) + 1e-6)) + b,
        ),
    ),
    "SkipLayerNorm": Published(
        "BERT's output",
        lambda x, s, w, b: F.layer_norm(s + x, (16,), w, b, 1e-12),
        (X, OTHER, ROW, ROW + 1),
        (lambda x, s, w, b: F.layer_norm(x * s, (16,), w, b), lambda x, s, w, b: F.layer_norm(x + s, (5, 16))),
    ),
    "BiasSkipLayerNorm": Published(
        "BERT's output with the product's bias",
        lambda x, c, s, w, b: F.layer_norm(s + (x + c), (16,), w, b),
        (X, ROW, OTHER, ROW, ROW + 1),
        (
            lambda x, c, s, w, b: F.layer_norm(s * (x + c), (16,), w, b),
            lambda x, c, s, w, b: F.layer_norm(s + (x * c), (16,), w, b),
        ),
    ),
    "DropoutAddLayerNorm": Published(
        "a post-norm layer in training",
        lambda x, k, s, w, b: F.layer_norm(s + x * k * (1 / 0.9), (16,), w, b),
        (X, mask(2, 5, 16).float(), OTHER, ROW, ROW + 1),
        (
            lambda x, k, s, w, b: F.layer_norm(s + (x - k) / 0.9, (16,), w, b),
            lambda x, k, s, w, b: F.layer_norm(s * x * k / 0.9, (16,), w, b),
        ),
    ),
    "GroupNormSilu": Published(
        "Stable Diffusion's residual block",
        lambda x, w, b: torch.sigmoid(y := F.group_norm(x, 4, w, b, 1e-6)) * y,
        (IMAGE, r(8), r(8)),
        (lambda x, w, b: torch.tanh(F.group_norm(x, 4, w, b)), lambda x, w, b: F.silu(F.instance_norm(x))),
    ),
    "MeanVarianceNorm": Published(
        "style transfer",
        style_norm,
        (IMAGE,),
        (lambda x: mean_norm(x, (1, 2, 3)), lambda x: mean_norm(x, (2, 3), power=4)),
    ),
    "L2Norm": Published(
        "the keys of gated delta networks",
        lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6),
        (X,),
        (
            lambda x: x * torch.rsqrt(x.abs().sum(-1, keepdim=True) + 1e-6),
            lambda x: x * torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6),
        ),
    ),
    "PlainAttention": Published(
        "the Annotated Transformer",
        lambda q, k, v: attention(q, k, v, lambda s: s / math.sqrt(8)),
        HEADS,
        (lambda q, k, v: attention(q, k, v, lambda s: s / 3, dim=-2), lambda q, k, v: attention(q, k, v, torch.relu)),
    ),
    "BiasedAttention": Published(
        "BERT",
        lambda q, k, v, m: attention(q, k, v, lambda s: s / math.sqrt(8) + m),
        (*HEADS, r(2, 1, 1, 6)),
        (
            lambda q, k, v, m: attention(q, k, v, lambda s: s / 3 * m),
            lambda q, k, v, m: attention(q, k, v, lambda s: torch.tanh(s / 3) + m),
        ),
    ),
    "UnscaledAttention": Published(
        "T5",
        lambda q, k, v, b: attention(q, k, v, lambda s: b + s),
        (*HEADS, r(1, 4, 6, 6)),
        (
            lambda q, k, v, b: attention(q, k, v, lambda s: s + b, dim=-2),
            lambda q, k, v, b: attention(q, k, v, lambda s: s - b * b),
        ),
    ),
    "FilledAttention": Published(
        "Mistral's window",
        lambda q, k, v, h: attention(q, k, v, lambda s: (s * 0.3).masked_fill(h, -1e4)),
        (*HEADS, torch.ones(6, 6).triu(1).bool()),
        (
            lambda q, k, v, h: attention(q, k, v, lambda s: torch.where(h, s * 0.3, -1e4)),
            lambda q, k, v, h: attention(q, k, v, lambda s: torch.relu(s).masked_fill(h, -1e4)),
        ),
    ),
    "DroppedAttention": Published(
        "GPT-2 in training",
        lambda q, k, v, d: (d * F.softmax(q @ k.mT / 8**0.5, -1)) @ v,
        (*HEADS, mask(2, 4, 6, 6).float() / 0.9),
        (
            lambda q, k, v, d: (d + F.softmax(q @ k.mT / 8**0.5, -1)) @ v,
            lambda q, k, v, d: F.softmax(d * (q @ k.mT) / 8**0.5, -1) @ v,
        ),
    ),
    "CappedAttention": Published(
        "Gemma 2",
        lambda q, k, v: attention(q, k, v, lambda s: torch.tanh((s * 0.35) / 50) * 50),
        HEADS,
        (
            lambda q, k, v: attention(q, k, v, lambda s: torch.sigmoid(s / 50) * 50),
            lambda q, k, v: attention(q, k, v, lambda s: torch.tanh(s / 50) + 50),
        ),
    ),
    "GroupedQueryAttention": Published(
        "Llama 3",
        grouped,
        (r(2, 4, 6, 8), r(2, 2, 6, 8), r(2, 2, 6, 8)),
        (
            lambda q, k, v: grouped(q, k, v, tiled_kv),
            lambda q, k, v: attention(q, repeat_kv(k, 2), repeat_kv(v, 2), torch.relu),
        ),
    ),
    "CachedAttention": Published(
        "BART's decoder",
        cached,
        (r(2, 4, 1, 8), r(2, 4, 5, 8), r(2, 4, 5, 8), r(2, 4, 1, 8), r(2, 4, 1, 8)),
        (
            cached_twice_scaled,
            lambda q, a, b, c, d: attention(q, torch.cat([a, c], 2), torch.cat([b, d], 2), torch.tanh),
        ),
    ),
    "LinearAttention": Published(
        "Transformers are RNNs",
        linear_attention,
        HEADS,
        (
            lambda q, k, v: linear_attention(q, k, v, torch.relu),
            lambda q, k, v: linear_attention(q, k, v, lambda x: F.elu(x) + 2),
        ),
    ),
    "ScaledMaskedSoftmax": Published(
        "Megatron",
        lambda s, h: torch.softmax((s / 8).masked_fill(h, -10000.0), dim=-1),
        (r(2, 4, 6, 6), mask(2, 1, 6, 6)),
        (
            lambda s, h: torch.softmax((s + 8).masked_fill(h, -10000.0), dim=-1),
            lambda s, h: torch.softmax((s / 8).masked_fill(h, -10000.0), dim=1),
        ),
    ),
    "RotaryOfHalves": Published(
        "Llama",
        lambda x, cos, sin: (x * cos) + (rotate_half(x) * sin),
        (r(2, 4, 5, 8), r(5, 8), r(5, 8)),
        (
            lambda x, cos, sin: x * cos + rotate_back(x) * sin,
            lambda x, cos, sin: x * cos - rotate_half(x) * sin,
        ),
    ),
    "RotaryOfPairs": Published(
        "GPT-J",
        lambda x, cos, sin: (x * cos) + (rotate_every_two(x) * sin),
        (r(2, 4, 5, 8), r(5, 8), r(5, 8)),
        (lambda x, cos, sin: x * cos + turned_back(x) * sin, lambda x, cos, sin: x * cos + rotate_half(x) * sin),
    ),
    "RotaryOfComplex": Published(
        "Meta's Llama",
        lambda x, turn: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(3) * 2,
        (r(2, 4, 5, 8), torch.polar(torch.ones(5, 4), r(5, 4))),
        (
            lambda x, turn: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) + turn).flatten(3) * 2,
            lambda x, turn: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) / turn).flatten(3) * 2,
        ),
    ),
    "EmbeddingLayerNorm": Published(
        "BERT",
        bert_embeddings,
        (ids(9, 2, 5), r(9, 16), ids(5, 2, 5), r(5, 16), ROW, ROW + 1),
        (
            lambda i, a, j, b, w, c: F.layer_norm(F.embedding(i, a) * F.embedding(j, b), (16,), w, c),
            lambda i, a, j, b, w, c: F.layer_norm(F.embedding(i, a) + F.embedding(j, b), (5, 16)),
        ),
    ),
    "AlibiBias": Published(
        "BLOOM",
        alibi,
        (r(2, 4, 6, 6), p(4), torch.arange(6)),
        (
            lambda s, m, places: alibi(s, m, places, sign=2),
            lambda s, m, places: torch.softmax(s * m.view(-1, 1, 1) * (places[None] - places[:, None]).float(), -1),
        ),
    ),
    "ConvBatchNormRelu": Published(
        "ResNet",
        lambda x, k, m, v, w, b: F.relu(F.batch_norm(F.conv2d(x, k, padding=1), m, v, w, b, eps=1e-3)),
        (*CONV, r(16), p(16), r(16), r(16)),
        (
            lambda x, k, m, v, w, b: torch.tanh(F.batch_norm(F.conv2d(x, k, padding=1), m, v, w, b)),
            lambda x, k, m, v, w, b: F.relu(F.batch_norm(F.conv2d(F.pad(x, (1, 1, 1, 1)), k) * 2, m, v, w, b)),
        ),
    ),
    "ConvBatchNormTrain": Published(
        "ResNet in training",
        lambda x, k, w, b: F.relu(F.batch_norm(F.conv2d(x, k, padding=1), None, None, w, b, training=True)),
        (*CONV, r(16), r(16)),
        (
            lambda x, k, w, b: torch.tanh(F.batch_norm(F.conv2d(x, k, padding=1), None, None, w, b, training=True)),
            lambda x, k, w, b: F.relu(F.batch_norm(F.conv2d(x, k, padding=1), None, None, w, training=True)) * b.sum(),
        ),
    ),
    "ConvBiasRelu": Published(
        "VGG",
        lambda x, k, b: F.conv2d(x, k, b, padding=1).clamp(min=0),
        (*CONV, r(16)),
        (
            lambda x, k, b: torch.tanh(F.conv2d(x, k, b, padding=1)),
            lambda x, k, b: F.relu(F.conv2d(x, k) * b[:, None, None]),
        ),
    ),
    "ConvAddRelu": Published(
        "ResNet without norms",
        lambda x, k, b, s: F.relu(s + F.conv2d(x, k, b, padding=1)),
        (*CONV, r(16), r(2, 16, 6, 6)),
        (
            lambda x, k, b, s: F.relu(s * F.conv2d(x, k, b, padding=1)),
            lambda x, k, b, s: torch.sigmoid(s + F.conv2d(x, k, b, padding=1)),
        ),
    ),
    "SqueezeExcite": Published(
        "SENet",
        squeeze_excite,
        (IMAGE, r(2, 8, 1, 1), r(2), r(8, 2, 1, 1), r(8)),
        (
            lambda x, a, b, c, d: squeeze_excite(x, a, b, c, d, torch.tanh),
            lambda x, a, b, c, d: x + torch.sigmoid(F.conv2d(F.relu(F.conv2d(x.mean((2, 3), True), a, b)), c, d)),
        ),
    ),
    "PixelShuffleRelu": Published(
        "ESPCN",
        lambda x: F.relu(F.pixel_shuffle(x, 2)),
        (IMAGE,),
        (lambda x: depth_to_space(x, (0, 1, 4, 3, 5, 2)), lambda x: torch.tanh(F.pixel_shuffle(x, 2))),
    ),
    "ConcatShuffle": Published(
        "ShuffleNet V2",
        shuffle,
        (r(2, 6, 4, 4), r(2, 6, 4, 4)),
        (lambda x, y: shuffle(x, y, groups=3), lambda x, y: shuffle(x, torch.cat([y, y], 1), groups=2)),
    ),
    "LayerScaleAdd": Published(
        "ConvNeXt",
        lambda x, f, g: g * f + x,
        (X, OTHER, ROW),
        (lambda x, f, g: g * f * x, lambda x, f, g: torch.relu(f) + x + g),
    ),
    "LabelSmoothing": Published(
        "translation",
        smoothed,
        (r(4, 16), ids(16, 4)),
        (lambda x, t: smoothed(x, t, dim=0), lambda x, t: smoothed(x, t, take=torch.sum)),
    ),
    "FocalLoss": Published(
        "RetinaNet",
        lambda x, t: focal(x, t, reached),
        (r(4, 16), mask(4, 16).float()),
        (lambda x, t: focal(x, t, lambda p_, t: p_ * t), lambda x, t: focal(x, t, lambda p_, t: p_ + t)),
    ),
    "KlDivergence": Published(
        "distillation",
        lambda x, t: torch.sum(t * (t.log() - x), dim=-1),
        (LOGS[0], p(4, 16)),
        (lambda x, t: torch.sum(t * (t.log() + x), dim=-1), lambda x, t: torch.sum(t * (t.log() - x), dim=0)),
    ),
    "JensenShannon": Published(
        "distillation",
        jensen_shannon,
        LOGS,
        (
            lambda x, y: (
                jensen_shannon(x, y, 0.5, -0.5) + jensen_shannon(x, y, -0.5, 0.5) if x.dim() > 9 else (x * y).sum(-1)
            ),
            lambda x, y: (y.exp() * (y - torch.log(x.exp() * y.exp()))).sum(-1),
        ),
    ),
    "TotalVariation": Published(
        "distillation",
        lambda p_, q: (p_ - q).abs().sum(dim=-1) / 2,
        (p(4, 16), p(4, 16)),
        (lambda p_, q: (p_ - q).square().sum(dim=-1) / 2, lambda p_, q: (p_ - q).abs().sum(dim=-1) / 3),
    ),
    "ShiftedLogSumExp": Published(
        "a CRF's normaliser",
        crf_normaliser,
        (r(4, 16),),
        (lambda x: crf_normaliser(x, torch.sigmoid), lambda x: crf_normaliser(x, dim=0)),
    ),
    "GumbelMax": Published(
        "gpt-fast's sampler",
        lambda x, q: torch.argmax(F.softmax(x, dim=-1) / q, dim=-1),
        (r(4, 16), p(4, 16)),
        (lambda x, q: torch.argmax(F.softmax(x, -1) * q, -1), lambda x, q: torch.argmax(F.softmax(x, 0) / q, -1)),
    ),
    "FactorizationMachine": Published(
        "DeepFM",
        lambda e: (torch.sum(e, 1) ** 2 - torch.sum(e**2, 1)) * 0.5,
        (X,),
        (
            lambda e: (torch.sum(e, 2) ** 2 - torch.sum(e**2, 2)) * 0.5,
            lambda e: torch.sum(e, 1) ** 2 + torch.sum(e**2, 1),
        ),
    ),
    "LstmCell": Published(
        "an LSTM written by hand",
        lstm,
        (GATES, STATE),
        (lambda g, c: lstm(g, c, torch.relu), lambda g, c: lstm(g.flip(1).tanh(), c, torch.sigmoid)),
    ),
    "GruCell": Published(
        "a GRU written by hand",
        gru,
        (r(3, 24), r(3, 24), STATE),
        (lambda x, h, s: gru(x, h, s, torch.relu), lambda x, h, s: gru(x, h, s, keep=lambda z: 2 - z)),
    ),
    "AttentionGruCell": Published(
        "DIEN",
        augru,
        (STATE, r(3, 8), p(3, 1), r(3, 8)),
        (lambda z, n, a, s: augru(z, n, a, s, torch.relu), augru_without_gate),
    ),
    "PeepholeCell": Published(
        "Graves' LSTM",
        peephole,
        (GATES, STATE, r(8), r(8), r(8)),
        (lambda g, c, i, f, o: peephole(g, c, i, f, o, late=False), peephole_relu),
    ),
    "LayerNormCell": Published(
        "RNN-T's encoder",
        norm_lstm,
        (GATES, STATE, r(8), r(8)),
        (lambda g, c, w, b: norm_lstm(g, c, w, b, torch.relu), norm_lstm_without_bias),
    ),
    "LightGruCell": Published(
        "SpeechBrain's LiGRU",
        light_gru,
        (r(3, 16), STATE),
        (lambda g, h: light_gru(g, h, torch.tanh), lambda g, h: light_gru(g, h, keep=lambda z: 2 - z)),
    ),
    "IndependentCell": Published(
        "IndRNN",
        lambda x, u, h: torch.tanh(h * u + x),
        (STATE, r(8), r(3, 8)),
        (lambda x, u, h: torch.tanh((h + u) * x), lambda x, u, h: torch.relu(h * u + x)),
    ),
    "CrfStep": Published(
        "pytorch-crf",
        crf_step,
        (*CHAIN, mask(3)),
        (lambda s, t, e, m: crf_step(s, t, e, m, dim=2), crf_step_of_max),
    ),
    "ViterbiStep": Published(
        "pytorch-crf",
        viterbi,
        CHAIN,
        (lambda s, t, e: viterbi(s, t, e, dim=2), lambda s, t, e: (s.unsqueeze(2) * t + e.unsqueeze(1)).max(1)[:2]),
    ),
    "SelectiveScanStep": Published(
        "Mamba",
        mamba,
        SCAN,
        (lambda h, dt, a, b, c, x: mamba(h, dt, a, b, c, x, torch.sigmoid), mamba_without_step),
    ),
    "DecayGate": Published(
        "Qwen 3 Next",
        lambda a, x, b: -a.exp() * F.softplus(b + x),
        (r(4), r(2, 3, 4), r(4)),
        (lambda a, x, b: -a.exp() * F.softplus(b * x), lambda a, x, b: a.exp() + F.softplus(b + x)),
    ),
    "TopExperts": Published(
        "Mixtral",
        mixtral,
        (r(5, 8),),
        (lambda x: mixtral(x, dim=0), unnormalised),
    ),
    "BiasedExperts": Published(
        "DeepSeek V3",
        deepseek,
        (r(5, 8), r(8)),
        (lambda x, c: deepseek(x, c, torch.tanh), deepseek_corrected),
    ),
    "FakeQuantise": Published(
        "quantisation-aware training",
        lambda x: (x / 0.05).round().clamp(-128, 127) * 0.05,
        (X,),
        (lambda x: (x / 0.05).round().clamp(-127, 127) * 0.05, lambda x: (x / 0.05).floor().clamp(-128, 127) * 0.05),
    ),
    "DynamicQuantise": Published(
        "per-token activations",
        token_quantise,
        (X,),
        (lambda x: token_quantise(x, dim=1), lambda x: token_quantise(x, most=120)),
    ),
    "DequantisedProduct": Published(
        "gpt-fast's int8 weights",
        lambda x, w, s: F.linear(x, w.to(dtype=x.dtype)) * s,
        (r(4, 8), ids(100, 6, 8).to(torch.int8), p(6)),
        (lambda x, w, s: F.linear(x, w.float()) + s, lambda x, w, s: F.linear(x, w.float() * s[:, None])),
    ),
    "RmsNormQuantise": Published(
        "Llama in eight bits",
        norm_quantise,
        (X, ROW, p(1)),
        (lambda x, w, s: norm_quantise(x, w, s, most=100), lambda x, w, s: norm_quantise(x, w, s, near=torch.floor)),
    ),
    "LowRankSum": Published(
        "LoRA",
        lambda x, w, a, b: torch.mm(x, w) + 0.5 * ((x @ a) @ b),
        (r(5, 8), r(8, 6), r(8, 2), r(2, 6)),
        (lambda x, w, a, b: x @ w * 0.5 * (x @ a @ b), lambda x, w, a, b: x @ w + 0.5 * (torch.relu(x @ a) @ b)),
    ),
    "CrossEntropy": Published(
        "any classifier",
        lambda x, t: F.cross_entropy(x, t, ignore_index=-1),
        (r(4, 16), ids(16, 4)),
        (lambda x, t: F.nll_loss(x, t), lambda x, t: F.nll_loss(F.log_softmax(x, 0), t)),
    ),
    "NearestUpsample": Published(
        "a feature pyramid",
        lambda x, s: F.interpolate(x, scale_factor=2) + s,
        (IMAGE, r(2, 8, 12, 12)),
        (
            lambda x, s: F.interpolate(x, scale_factor=2, mode="bilinear") + s,
            lambda x, s: F.interpolate(x, scale_factor=3)[..., :12, :12] + s,
        ),
    ),
    "RepeatedEmbedding": Published(
        "GPT's positions",
        lambda words, table, at, places: F.embedding(words, table) + F.embedding(at, places),
        (ids(9, 2, 5), r(9, 16), torch.arange(5), r(5, 16)),
        (
            lambda words, table, at, places: F.embedding(words, table) * F.embedding(at, places),
            lambda words, table, at, places: F.embedding(words, table) - F.embedding(at, places),
        ),
    ),
}
