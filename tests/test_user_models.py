"""Models as people write them, each in its author's manner: loops of every kind, attention, convolutions, losses.

Every one is right by the oracle in inference, and in training but where PyTorch itself is not of one mind.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor, randn

from fuse.check.oracle import check

MODELS: dict[str, tuple[type[nn.Module], Callable[[], tuple[Tensor, ...]], bool]] = {}


def model(inputs, train=True):
    def registered(cls):
        MODELS[cls.__name__] = (cls, inputs, train)
        return cls

    return registered


@model(lambda: (randn(2, 10, 16),))
class IndRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(16, 24)
        self.u = nn.Parameter(torch.rand(24))

    def forward(self, x):
        h = x.new_zeros(x.size(0), 24)
        out = []
        for xt in x.unbind(1):
            h = F.relu(self.w(xt) + self.u * h)
            out.append(h)
        return torch.stack(out, 1), h


@model(lambda: (randn(12, 3, 8),))
class PeepholeLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Linear(8, 4 * 16)
        self.h = nn.Linear(16, 4 * 16, bias=False)
        self.pi = nn.Parameter(randn(16) * 0.1)
        self.pf = nn.Parameter(randn(16) * 0.1)
        self.po = nn.Parameter(randn(16) * 0.1)

    def forward(self, x):
        h = c = torch.zeros(x.shape[1], 16, device=x.device)
        ys = []
        for t in range(len(x)):
            i, f, g, o = (self.x(x[t]) + self.h(h)).chunk(4, -1)
            i = torch.sigmoid(i + self.pi * c)
            f = torch.sigmoid(f + self.pf * c)
            c = f * c + i * torch.tanh(g)
            o = torch.sigmoid(o + self.po * c)
            h = o * torch.tanh(c)
            ys += [h]
        return torch.cat([y.unsqueeze(0) for y in ys], 0)


@model(lambda: (randn(3, 9, 8), torch.tensor([9, 4, 6])))
class MaskedGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 12)

    def forward(self, x, lengths):
        mask = torch.arange(x.size(1))[None] < lengths[:, None]
        h = torch.zeros(x.size(0), 12)
        for t in range(x.size(1)):
            new = self.cell(x[:, t], h)
            h = torch.where(mask[:, t, None], new, h)
        return h


@model(lambda: (randn(2, 8, 16), randn(2, 11, 16)))
class CrossAttn(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 32)
        self.kv = nn.Linear(16, 64)
        self.o = nn.Linear(32, 16)
        self.n = nn.LayerNorm(16)

    def forward(self, x, mem, mask: torch.Tensor | None = None):
        B, T, _ = x.shape
        q = self.q(self.n(x)).view(B, T, 4, 8).transpose(1, 2)
        k, v = self.kv(mem).chunk(2, -1)
        k = k.view(B, -1, 4, 8).transpose(1, 2)
        v = v.view(B, -1, 4, 8).transpose(1, 2)
        a = (q @ k.transpose(-1, -2)) / math.sqrt(8)
        if mask is not None:
            a = a.masked_fill(mask, float("-inf"))
        return x + self.o((a.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1))


@model(lambda: (randn(2, 6, 32),))
class RoPE(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)
        f = 1 / (10000 ** (torch.arange(0, 8, 2) / 8))
        p = torch.outer(torch.arange(64.0), f)
        self.register_buffer("cos", p.cos())
        self.register_buffer("sin", p.sin())
        self.o = nn.Linear(32, 32)

    def rot(self, x):
        c, n = self.cos[: x.size(2)], self.sin[: x.size(2)]
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * c - b * n, a * n + b * c], -1).flatten(-2)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.o(
            F.scaled_dot_product_attention(self.rot(q), self.rot(k), v, is_causal=True).transpose(1, 2).flatten(2)
        )


@model(lambda: (randn(2, 5, 16),))
class SwiGLUBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(16, 40, bias=False)
        self.w2 = nn.Linear(40, 16, bias=False)
        self.w3 = nn.Linear(16, 40, bias=False)
        self.g = nn.Parameter(torch.ones(16))

    def norm(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.g

    def forward(self, x):
        return x + self.w2(F.silu(self.w1(self.norm(x))) * self.w3(self.norm(x)))


@model(lambda: (torch.randint(0, 30, (4, 7)),))
class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(30, 12, padding_idx=0)
        self.cs = nn.ModuleList([nn.Conv1d(12, 8, k) for k in (2, 3, 4)])
        self.f = nn.Linear(24, 3)
        self.d = nn.Dropout(0.1)

    def forward(self, x):
        e = self.e(x).permute(0, 2, 1)
        return self.f(self.d(torch.cat([F.relu(c(e)).max(-1)[0] for c in self.cs], 1)))


@model(lambda: (randn(6, 5), torch.tensor([[0, 1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 0, 3]])))
class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 8)
        self.b = nn.Linear(8, 3)

    def conv(self, x, e, part):
        x = part(x)
        d = torch.zeros(x.size(0)).scatter_add_(0, e[1], torch.ones(e.size(1))).clamp(min=1)
        return torch.zeros_like(x).index_add_(0, e[1], x[e[0]]) / d[:, None]

    def forward(self, x, e):
        return F.log_softmax(self.conv(F.relu(self.conv(x, e, self.a)), e, self.b), -1)


@model(lambda: (randn(2, 3, 16, 16),))
class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.ModuleList([nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 5, padding=2)])
        self.n = nn.BatchNorm2d(15)

    def forward(self, x):
        return F.adaptive_avg_pool2d(
            F.relu6(self.n(torch.cat([b(x) for b in self.b] + [F.max_pool2d(x, 3, 1, 1)], 1))), (1, 1)
        ).flatten(1)


@model(lambda: (randn(2, 4, 8, 8),))
class PixelUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(4, 16, 3, padding=1)
        self.p = nn.PReLU(4)

    def forward(self, x):
        return self.p(F.pixel_shuffle(self.c(x), 2)) + F.interpolate(
            x, scale_factor=2, mode="bilinear", align_corners=False
        )


@model(lambda: (randn(2, 1, 28, 28),))
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Linear(784, 40)
        self.d = nn.Linear(20, 784)

    def forward(self, x):
        mu, lv = self.e(x.flatten(1)).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return torch.sigmoid(self.d(z)).view_as(x), -0.5 * (1 + lv - mu**2 - lv.exp()).sum(1).mean()


class Out(NamedTuple):
    logits: torch.Tensor
    hidden: list


@model(lambda: (randn(3, 5, 8),))
class NamedOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.ls = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x):
        hs = [x]
        for part in self.ls:
            hs.append(torch.tanh(part(hs[-1])) + hs[-1])
        return Out(hs[-1].mean(1), hs[1:])


@model(lambda: (randn(2, 20, 6),))
class TCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.ModuleList(
            [nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 6, 3, dilation=2**i)) for i in range(3)]
        )

    def forward(self, x):
        x = x.transpose(1, 2)
        for i, c in enumerate(self.c):
            x = F.relu(c(F.pad(x, (2 * 2**i, 0)))) + x
        return x.transpose(1, 2)


@model(lambda: (randn(5, 10, 4),))
class ESN(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("w", randn(20, 20) * 0.1)
        self.register_buffer("wi", randn(20, 4))
        self.o = nn.Linear(20, 2)
        self.leak = 0.3

    def forward(self, x):
        st = torch.zeros(x.shape[0], 20)
        al = []
        for t in range(x.shape[1]):
            st = (1 - self.leak) * st + self.leak * torch.tanh(x[:, t] @ self.wi.T + st @ self.w.T)
            al.append(st)
        return self.o(torch.stack(al, 1)[:, -3:])


@model(lambda: (randn(2, 12, 8),))
class S4D(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.rand(8, 4))
        self.b = nn.Parameter(randn(8, 4))
        self.c = nn.Parameter(randn(8, 4))
        self.d = nn.Parameter(randn(8))

    def forward(self, u):
        dt = 0.1
        A = torch.exp(-F.softplus(self.a) * dt)
        h = torch.zeros(u.size(0), 8, 4)
        y = []
        for t in range(u.size(1)):
            h = A * h + (dt * self.b) * u[:, t, :, None]
            y.append((h * self.c).sum(-1) + self.d * u[:, t])
        return torch.stack(y, 1)


@model(lambda: (randn(3, 15, 5),))
class MinGRULog(nn.Module):
    def __init__(self):
        super().__init__()
        self.z = nn.Linear(5, 7)
        self.h = nn.Linear(5, 7)

    def forward(self, x):
        k = self.z(x)
        z = torch.sigmoid(k)
        ht = torch.tanh(self.h(x))
        h = torch.zeros(x.size(0), 7)
        o = []
        for t in range(x.size(1)):
            h = torch.lerp(h, ht[:, t], z[:, t])
            o.append(h)
        return torch.stack(o, 1)


@model(lambda: (randn(2, 9, 6),))
class FastWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(6, 6)
        self.k = nn.Linear(6, 6)
        self.v = nn.Linear(6, 6)
        self.b = nn.Linear(6, 1)

    def forward(self, x):
        W = torch.zeros(x.size(0), 6, 6)
        o = []
        for t in range(x.size(1)):
            q, k, v = self.q(x[:, t]), F.normalize(self.k(x[:, t]), dim=-1), self.v(x[:, t])
            beta = torch.sigmoid(self.b(x[:, t]))
            old = torch.einsum("bij,bj->bi", W, k)
            W = W + torch.einsum("bi,bj->bij", beta * (v - old), k)
            o.append(torch.bmm(W, q.unsqueeze(-1)).squeeze(-1))
        return torch.stack(o, 1), W


@model(lambda: (randn(2, 8, 10),))
class ONLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(10 + 12, 12 * 6)

    def forward(self, x):
        h = x.new_zeros(2, 12)
        c = x.new_zeros(2, 12)

        def cum(t):
            return torch.cumsum(torch.softmax(t, -1), -1)

        for t in range(x.size(1)):
            i, f, o, g, mf, mi = self.part(torch.cat([x[:, t], h], -1)).split(12, -1)
            mf, mi = cum(mf), 1 - cum(mi)
            w = mf * mi
            fh = torch.sigmoid(f) * w + (mf - w)
            ih = torch.sigmoid(i) * w + (mi - w)
            c = fh * c + ih * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


@model(lambda: (randn(4, 6),))
class Newton(nn.Module):
    def forward(self, x):
        y = x.abs() + 1
        for _ in range(8):
            y = 0.5 * (y + (x.abs() + 1) / y)
        return y


@model(lambda: (randn(4, 4),), train=False)
class QRLoop(nn.Module):
    def forward(self, a):
        a = a @ a.T
        for _ in range(5):
            q, r = torch.linalg.qr(a)
            a = r @ q
        return a.diagonal()


@model(lambda: (randn(3, 7, 5),))
class KalmanLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.F = nn.Parameter(torch.eye(5) * 0.9)
        self.H = nn.Parameter(randn(5, 5) * 0.3)

    def forward(self, z):
        x = torch.zeros(z.size(0), 5)
        P = torch.eye(5).expand(z.size(0), 5, 5)
        xs = []
        for t in range(z.size(1)):
            x = x @ self.F.T
            P = self.F @ P @ self.F.T + 0.1 * torch.eye(5)
            S = self.H @ P @ self.H.T + torch.eye(5)
            K = torch.linalg.solve(S, self.H @ P).transpose(-1, -2)
            x = x + (K @ (z[:, t] - x @ self.H.T).unsqueeze(-1)).squeeze(-1)
            P = P - K @ self.H @ P
            xs.append(x)
        return torch.stack(xs, 1)


@model(lambda: (randn(2, 10, 4),))
class Holt(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.3))
        self.b = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        part, tr = x[:, 0], x[:, 1] - x[:, 0]
        f = []
        for t in range(1, x.size(1)):
            f.append(part + tr)
            n = self.a * x[:, t] + (1 - self.a) * (part + tr)
            tr = self.b * (n - part) + (1 - self.b) * tr
            part = n
        return ((torch.stack(f, 1) - x[:, 1:]) ** 2).mean()


@model(lambda: (randn(3, 12),))
class IIrandn(nn.Module):
    def forward(self, x):
        y = torch.zeros_like(x)
        for n in range(x.size(1)):
            v = 0.2 * x[:, n]
            if n >= 1:
                v = v + 0.5 * y[:, n - 1]
            if n >= 2:
                v = v - 0.3 * y[:, n - 2]
            y[:, n] = v
        return y


@model(lambda: (randn(2, 3, 9, 9),))
class ConvGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Conv2d(3 + 4, 8, 3, padding=1)
        self.c = nn.Conv2d(3 + 4, 4, 3, padding=1)

    def forward(self, x):
        h = x.new_zeros(2, 4, 9, 9)
        for _ in range(6):
            r, z = torch.sigmoid(self.g(torch.cat([x, h], 1))).chunk(2, 1)
            h = (1 - z) * h + z * torch.tanh(self.c(torch.cat([x, r * h], 1)))
        return h


@model(lambda: (randn(4, 10),))
class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(10, 3)
        self.e = nn.ModuleList([nn.Sequential(nn.Linear(10, 10), nn.GELU()) for _ in range(3)])

    def forward(self, x):
        w, i = self.g(x).softmax(-1).topk(2, -1)
        w = w / w.sum(-1, keepdim=True)
        y = torch.stack([e(x) for e in self.e], 1)
        return (y.gather(1, i[..., None].expand(-1, -1, 10)) * w[..., None]).sum(1)


@model(lambda: (randn(2, 3, 8, 8),))
class CBAM(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 3))
        self.c = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x):
        a = torch.sigmoid(self.m(x.mean((2, 3))) + self.m(x.amax((2, 3))))
        x = x * a[..., None, None]
        return x * torch.sigmoid(self.c(torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)))


@model(lambda: (randn(3, 6, 8), randn(3, 6, 8)))
class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(torch.tensor(2.0))

    def forward(self, a, b):
        a = F.normalize(a.mean(1), dim=-1)
        b = F.normalize(b.mean(1), dim=-1)
        part = self.t.exp() * a @ b.t()
        y = torch.arange(len(part))
        return (F.cross_entropy(part, y) + F.cross_entropy(part.t(), y)) / 2


@model(lambda: (randn(2, 4, 16),))
class MHA(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(16, 4, batch_first=True)
        self.n = nn.LayerNorm(16)

    def forward(self, x):
        y, w = self.a(x, x, x, attn_mask=torch.triu(torch.ones(4, 4, dtype=torch.bool), 1))
        return self.n(x + y), w


@model(lambda: (randn(2, 6, 16),))
class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True, dropout=0.0), 2
        )

    def forward(self, x):
        return self.e(x)


@model(lambda: (randn(2, 7, 6),))
class BiGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.GRUCell(6, 5)
        self.b = nn.GRUCell(6, 5)
        self.o = nn.Linear(10, 2)

    def forward(self, x):
        T = x.size(1)
        hf = [x.new_zeros(2, 5)]
        hb = [x.new_zeros(2, 5)]
        for t in range(T):
            hf.append(self.f(x[:, t], hf[-1]))
        for t in reversed(range(T)):
            hb.append(self.b(x[:, t], hb[-1]))
        return self.o(torch.cat([torch.stack(hf[1:], 1), torch.stack(hb[1:][::-1], 1)], -1))


@model(lambda: (randn(3, 10, 4),))
class Highway(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.t = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.x = nn.Linear(4, 8)

    def forward(self, x):
        st = torch.zeros(3, 8)
        for xt in x.split(1, 1):
            xt = self.x(xt.squeeze(1))
            for i, (h, t) in enumerate(zip(self.h, self.t, strict=False)):
                inp = st + xt if i == 0 else st
                g = torch.sigmoid(t(inp))
                st = torch.tanh(h(inp)) * g + st * (1 - g)
        return st


@model(lambda: (randn(1, 12),))
class Euler(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(12, 20), nn.Softplus(), nn.Linear(20, 12))

    def forward(self, y):
        ts = torch.linspace(0, 1, 11)
        tr = [y]
        for a, b in itertools.pairwise(ts):
            k1 = self.f(y)
            k2 = self.f(y + (b - a) * k1 / 2)
            y = y + (b - a) * k2
            tr.append(y)
        return torch.stack(tr)


@model(lambda: (randn(2, 3, 32, 32),))
class MiniResNet(nn.Module):
    class B(nn.Module):
        def __init__(self, i, o, st):
            super().__init__()
            self.c1 = nn.Conv2d(i, o, 3, st, 1, bias=False)
            self.b1 = nn.BatchNorm2d(o)
            self.c2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
            self.b2 = nn.BatchNorm2d(o)
            self.d = (
                nn.Sequential(nn.Conv2d(i, o, 1, st, bias=False), nn.BatchNorm2d(o))
                if st != 1 or i != o
                else nn.Identity()
            )

        def forward(self, x):
            y = F.relu(self.b1(self.c1(x)), inplace=True)
            y = self.b2(self.c2(y))
            y += self.d(x)
            return F.relu_(y)

    def __init__(self):
        super().__init__()
        self.n = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), self.B(8, 8, 1), self.B(8, 16, 2), self.B(16, 16, 1))
        self.f = nn.Linear(16, 10)

    def forward(self, x):
        return self.f(self.n(x).mean([2, 3]))


@model(lambda: (randn(2, 3, 16, 16).to(memory_format=torch.channels_last),))
class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.n = nn.GroupNorm(2, 8)

    def forward(self, x):
        return F.hardswish(self.n(self.b(F.silu(self.a(x)))))


@model(lambda: (randn(2, 4, 10, 10),))
class ConvOdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2), padding_mode="zeros")
        self.b = nn.Conv2d(6, 6, 3, padding="same", bias=False, padding_mode="reflect")
        self.t = nn.ConvTranspose2d(6, 3, 3, stride=2, output_padding=1)

    def forward(self, x):
        return torch.tanh(self.t(F.leaky_relu(self.b(F.elu(self.a(x))), 0.1)))


@model(lambda: (randn(1, 2, 6, 7, 8),))
class Conv3(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv3d(2, 4, 3, padding=1)
        self.n = nn.InstanceNorm3d(4, affine=True)

    def forward(self, x):
        return F.relu(self.n(self.a(x))) + F.avg_pool3d(self.a(x), 3, 1, 1)


@model(lambda: (randn(7, 33),))
class OddLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(33, 17)
        self.b = nn.Linear(17, 5, bias=False)
        self.p = nn.Parameter(randn(5, 1))

    def forward(self, x):
        return (F.mish(self.b(F.gelu(self.a(x)).clamp(-1, 2))) @ self.p).squeeze(-1)


@model(lambda: (randn(64, 48), randn(48, 64)))
class AddMMs(nn.Module):
    def forward(self, a, b):
        y = torch.addmm(a[0, :1].expand(64), a, b, beta=0.5, alpha=2.0)
        z = torch.baddbmm(y[None], a[None], b[None], alpha=0.1)
        return F.relu(y) + z[0].t().contiguous(), (a @ b).t().relu(), (b.t() @ a.t()).sigmoid()


@model(lambda: (torch.tensor([[1.0, float("nan")], [float("inf"), -2.0]]).repeat(4, 8),), train=False)
class NaNLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x):
        return (
            F.relu(self.a(x)),
            F.hardtanh(self.a(x)),
            self.a(x).clamp(min=0),
            torch.maximum(self.a(x), torch.zeros(16)),
        )


@model(lambda: (randn(8, 16).double(),))
class Dbl(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16).double()
        self.n = nn.LayerNorm(16).double()

    def forward(self, x):
        return F.softplus(self.n(self.a(x))) + x


@model(lambda: (randn(8, 16).bfloat16(),))
class BF(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32).bfloat16()
        self.b = nn.Linear(32, 16).bfloat16()

    def forward(self, x):
        return self.b(F.gelu(self.a(x))) + x


@model(lambda: (randn(8, 16),))
class AutoCast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 16)
        self.n = nn.LayerNorm(16)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(F.relu(self.a(x)))
        return self.n(y.float() + x)


@model(lambda: (randn(4, 20, 8),))
class Conv1dStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.ModuleList([nn.Conv1d(8, 8, 3, padding=2**i, dilation=2**i) for i in range(3)])
        self.g = nn.Conv1d(8, 16, 1)

    def forward(self, x):
        h = x.transpose(1, 2)
        skips = 0
        for c in self.c:
            a, b = self.g(c(h)).chunk(2, 1)
            z = torch.tanh(a) * torch.sigmoid(b)
            skips = skips + z
            h = h + z
        return skips.transpose(1, 2)


@model(lambda: (randn(2, 12, 16),))
class LinAttn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 12, 3, 2, 8).permute(2, 0, 3, 1, 4)
        q = F.elu(q) + 1
        k = F.elu(k) + 1
        S = torch.zeros(2, 2, 8, 8)
        n = torch.zeros(2, 2, 8)
        o = []
        for t in range(12):
            S = S + k[:, :, t, :, None] * v[:, :, t, None, :]
            n = n + k[:, :, t]
            o.append((q[:, :, t, None, :] @ S).squeeze(-2) / ((q[:, :, t] * n).sum(-1, keepdim=True) + 1e-6))
        return torch.stack(o, 2)


@model(lambda: (randn(3, 10, 6),))
class ZoneoutLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.LSTMCell(6, 8)
        self.z = 0.1

    def forward(self, x):
        h = torch.zeros(3, 8)
        c = torch.zeros(3, 8)
        out = []
        for t in range(x.shape[1]):
            h1, c1 = self.c(x[:, t], (h, c))
            if self.training:
                mh = torch.bernoulli(torch.full_like(h, self.z))
                h = mh * h + (1 - mh) * h1
                c = c1
            else:
                h = self.z * h + (1 - self.z) * h1
                c = self.z * c + (1 - self.z) * c1
            out.append(h)
        return torch.stack(out, 1)


@model(lambda: (randn(2, 8, 6),))
class VarDropRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.RNNCell(6, 8, nonlinearity="relu")
        self.d = nn.Dropout(0.3)

    def forward(self, x):
        h = x.new_zeros(2, 8)
        ys = []
        for xt in x.transpose(0, 1):
            h = self.d(self.c(xt, h))
            ys.append(h)
        return torch.stack(ys)


@model(lambda: (torch.randint(0, 20, (3,)), randn(3, 9, 8)))
class AttnDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(20, 8)
        self.c = nn.GRUCell(16, 8)
        self.o = nn.Linear(8, 20)
        self.wa = nn.Linear(8, 8, bias=False)

    def forward(self, tok, enc):
        h = enc.mean(1)
        logits = []
        for _ in range(6):
            a = torch.softmax(torch.bmm(enc, self.wa(h).unsqueeze(2)).squeeze(2), -1)
            ctx = torch.bmm(a.unsqueeze(1), enc).squeeze(1)
            h = self.c(torch.cat([self.e(tok), ctx], -1), h)
            part = self.o(h)
            logits.append(part)
            tok = part.argmax(-1)
        return torch.stack(logits, 1)


@model(lambda: (randn(2, 6, 5), torch.randint(0, 5, (2, 6))))
class CRFNLL(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(randn(5, 5))
        self.s = nn.Parameter(randn(5))
        self.e = nn.Parameter(randn(5))

    def forward(self, em, tags):
        a = self.s + em[:, 0]
        sc = self.s[tags[:, 0]] + em[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for i in range(1, em.size(1)):
            a = torch.logsumexp(a.unsqueeze(2) + self.t + em[:, i].unsqueeze(1), 1)
            sc = sc + self.t[tags[:, i - 1], tags[:, i]] + em[:, i].gather(1, tags[:, i : i + 1]).squeeze(1)
        return (torch.logsumexp(a + self.e, 1) - sc - self.e[tags[:, -1]]).mean()


@model(lambda: (randn(2, 7, 5),), train=False)
class Viterbi(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(randn(5, 5))

    def forward(self, em):
        sc = em[:, 0]
        bp = []
        for i in range(1, em.size(1)):
            v, ix = (sc.unsqueeze(2) + self.t).max(1)
            sc = v + em[:, i]
            bp.append(ix)
        best = [sc.argmax(1)]
        for ix in reversed(bp):
            best.append(ix.gather(1, best[-1][:, None]).squeeze(1))
        return torch.stack(best[::-1], 1), sc.max(1).values


@model(lambda: (randn(3, 4, 6), randn(3, 4, 6)))
class DTW(nn.Module):
    def forward(self, a, b):
        D = torch.cdist(a, b)
        n, k = D.shape[1:]
        c = [[None] * k for _ in range(n)]
        for i in range(n):
            for j in range(k):
                if i == 0 and j == 0:
                    p = torch.zeros(3)
                elif i == 0:
                    p = c[i][j - 1]
                elif j == 0:
                    p = c[i - 1][j]
                else:
                    p = torch.minimum(torch.minimum(c[i - 1][j], c[i][j - 1]), c[i - 1][j - 1])
                c[i][j] = D[:, i, j] + p
        return c[-1][-1]


@model(lambda: (randn(2, 16, 8),))
class Mamba(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(8, 32)
        self.c = nn.Conv1d(16, 16, 4, groups=16, padding=3)
        self.x = nn.Linear(16, 1 + 8)
        self.dt = nn.Linear(1, 16)
        self.A = nn.Parameter(torch.arange(1, 5.0).repeat(16, 1).log())
        self.D = nn.Parameter(torch.ones(16))
        self.o = nn.Linear(16, 8)

    def forward(self, u):
        x, z = self.i(u).chunk(2, -1)
        x = F.silu(self.c(x.transpose(1, 2))[..., : u.size(1)].transpose(1, 2))
        dt, B, C = self.x(x).split([1, 4, 4], -1)
        dt = F.softplus(self.dt(dt))
        A = -self.A.exp()
        h = x.new_zeros(2, 16, 4)
        y = []
        for t in range(u.size(1)):
            h = h * torch.exp(dt[:, t, :, None] * A) + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
            y.append((h * C[:, t, None]).sum(-1))
        return self.o((torch.stack(y, 1) + x * self.D) * F.silu(z))


@model(lambda: (randn(5, 8),))
class Stash(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.acts = F.gelu(self.part(x))
        self.calls += 1
        return self.acts.softmax(-1)


@model(lambda: (randn(6, 8),))
class SpectralN(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))
        self.b = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x):
        return self.b(self.part(x))


@model(lambda: (randn(3, 3, 12, 12),))
class Pools(nn.Module):
    def forward(self, x):
        v, i = F.max_pool2d(x, 2, return_indices=True)
        u = F.max_unpool2d(v, i, 2)
        return (
            u
            + F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
            + F.lp_pool2d(x.abs(), 2, 1)
            + F.adaptive_max_pool2d(x, 6).repeat_interleave(2, 2).repeat_interleave(2, 3)
        )


@model(lambda: (randn(2, 5, 8), randn(2, 5, 8)))
class Losses(nn.Module):
    def forward(self, a, b):
        return (
            F.smooth_l1_loss(a, b)
            + F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")
            + F.cosine_embedding_loss(a[:, 0], b[:, 0], torch.ones(2))
            + F.huber_loss(a, b)
            + F.binary_cross_entropy_with_logits(a, b.sigmoid())
            + F.triplet_margin_loss(a[:, 0], a[:, 1], b[:, 0])
        )


@model(lambda: (randn(4, 9),))
class Cum(nn.Module):
    def forward(self, x):
        return (
            x.cumsum(-1),
            x.cumprod(-1),
            torch.logcumsumexp(x, -1),
            x.cummax(-1)[0],
            x.diff(dim=-1),
            x.flip(-1).roll(2, -1),
            torch.tril(x @ x.T),
        )


@model(lambda: (randn(2, 6, 8), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()))
class MaskedPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(8, 1)

    def forward(self, x, mask):
        w = self.part(x).squeeze(-1).masked_fill(~mask, -1e9).softmax(-1)
        m = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.cat([torch.einsum("bt,bth->bh", w, x), m, x.masked_fill(~mask[..., None], -math.inf).amax(1)], -1)


@model(lambda: (randn(3, 8),))
class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Linear(8, 8 * 4 + 4)

    def forward(self, x):
        p = self.h(x)
        W = p[:, :32].view(3, 4, 8)
        return torch.baddbmm(p[:, 32:].unsqueeze(-1), W, x.unsqueeze(-1)).squeeze(-1).tanh()


@model(lambda: (randn(2, 4, 6),))
class Sinkhorn(nn.Module):
    def forward(self, x):
        part = x @ x.transpose(1, 2)
        for _ in range(10):
            part = part - torch.logsumexp(part, 2, keepdim=True)
            part = part - torch.logsumexp(part, 1, keepdim=True)
        return part.exp()


@model(lambda: (randn(2, 10, 8),))
class TwoLayerLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.ModuleList([nn.LSTMCell(8, 8), nn.LSTMCell(8, 8)])
        self.n = nn.LayerNorm(8)
        self.o = nn.Linear(8, 3)

    def forward(self, x):
        st = [(torch.zeros(2, 8), torch.zeros(2, 8)) for _ in self.c]
        ys = []
        for t in range(x.size(1)):
            inp = x[:, t]
            for i, c in enumerate(self.c):
                st[i] = c(inp, st[i])
                inp = self.n(st[i][0]) + inp
            ys.append(self.o(inp))
        return torch.stack(ys, 1), [h for h, _ in st]


@model(lambda: (randn(2, 6, 8),))
class Gated(nn.Module):
    """Writes of steps that autograd looks at again, and gates whose operators have two results."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.decay = nn.Parameter(torch.rand(8))

    def forward(self, x):
        state, out = torch.zeros(2, 8), torch.zeros_like(x)
        for t in range(x.size(1)):
            out[:, t] = (state + x[:, t]) * F.logsigmoid(self.gate(x[:, t]))
            state = self.decay * state + x[:, t]
        return out


@model(lambda: (randn(6, 3),))
class RungeKutta(nn.Module):
    """Coordinates taken apart and put together in every stage of every step."""

    def __init__(self):
        super().__init__()
        self.sigma, self.rho, self.beta = (nn.Parameter(torch.tensor(value)) for value in (10.0, 28.0, 8 / 3))

    def slope(self, state):
        x, y, z = state[..., 0], state[..., 1], state[..., 2]
        return torch.stack([self.sigma * (y - x), x * (self.rho - z) - y, x * y - self.beta * z], -1)

    def forward(self, state):
        dt, path = 0.01, [state]
        for _ in range(6):
            k1 = self.slope(state)
            k2 = self.slope(state + dt / 2 * k1)
            k3 = self.slope(state + dt / 2 * k2)
            k4 = self.slope(state + dt * k3)
            state = state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            path.append(state)
        return torch.stack(path)


@model(lambda: (randn(2, 9, 6),))
class LocationAttention(nn.Module):
    """A decoder whose attention sees where it was, through a convolution."""

    def __init__(self):
        super().__init__()
        self.cell, self.query, self.memory = nn.GRUCell(6, 8), nn.Linear(8, 5, bias=False), nn.Linear(6, 5, bias=False)
        self.places, self.score = nn.Conv1d(2, 5, 5, padding=2, bias=False), nn.Linear(5, 1, bias=False)

    def forward(self, memory):
        keys, h = self.memory(memory), memory.new_zeros(2, 8)
        weights = total = memory.new_zeros(2, 9)
        read, out = memory.new_zeros(2, 6), []
        for _ in range(5):
            h = self.cell(read, h)
            places = self.places(torch.stack((weights, total), 1)).transpose(1, 2)
            energies = self.score(torch.tanh(self.query(h).unsqueeze(1) + keys + places))
            weights = F.softmax(energies.squeeze(-1), 1)
            total = total + weights
            read = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            out.append(torch.cat((h, read), -1))
        return torch.stack(out, 1)


@model(lambda: (randn(2, 10, 16),))
class DeltaRule(nn.Module):
    """Linear attention that corrects what it has stored, written into a tensor that lies as the heads do."""

    def __init__(self):
        super().__init__()
        self.qkv, self.beta = nn.Linear(16, 48), nn.Linear(16, 2)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        k, beta = F.normalize(k, dim=-1), self.beta(x).sigmoid().transpose(1, 2)
        state, out = x.new_zeros(2, 2, 8, 8), torch.empty_like(v)
        for t in range(x.size(1)):
            new = (v[:, :, t] - (state * k[:, :, t, :, None]).sum(-2)) * beta[:, :, t, None]
            state = state + k[:, :, t].unsqueeze(-1) * new.unsqueeze(-2)
            out[:, :, t] = torch.einsum("bhd,bhdm->bhm", q[:, :, t], state)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.usefixtures("seldom_optimised")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_right_in_inference(name: str) -> None:
    cls, inputs, _ = MODELS[name]
    with torch.no_grad():
        report = check(cls().eval(), inputs())
    assert report.passed, str(report)
    assert report.fallbacks == ()


@pytest.mark.sampled
@pytest.mark.usefixtures("unoptimised")
@pytest.mark.parametrize("name", [name for name, (_, _, trains) in MODELS.items() if trains])
def test_a_model_is_right_in_training(name: str) -> None:
    cls, inputs, _ = MODELS[name]
    args = [value.requires_grad_() if value.is_floating_point() else value for value in inputs()]
    report = check(cls(), args, train=True)
    assert report.passed, str(report)
