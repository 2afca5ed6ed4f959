"""What a step may hold: every body here is one kernel over all steps, as right as eager, at any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.testing import assert_fuses

BATCH, WIDTH, SOURCE = 3, 20, 5
LENGTHS = (5, 9)
Weights = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Body:
    """``run(weights, *inputs)`` loops over the first dimension of its first input.

    ``inputs`` are their shapes without that dimension; ``fixed`` those of inputs that are no sequences.
    """

    run: Callable[..., object]
    inputs: Sequence[tuple[int, ...]] = ((BATCH, WIDTH),)
    fixed: Sequence[tuple[int, ...]] = ()
    weights: tuple[tuple[int, ...], ...] = ()
    dtype: torch.dtype = torch.float32

    def model(self) -> nn.Module:
        body = self

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                drawn = (torch.randn(shape, dtype=body.dtype) / shape[-1] ** 0.5 for shape in body.weights)
                self.drawn = nn.ParameterList(nn.Parameter(w) for w in drawn)

            def forward(self, *inputs: Tensor) -> object:
                return body.run(list(self.drawn), *inputs)

        return Model().eval()

    def arguments(self, length: int) -> list[Tensor]:
        shapes = [*((length, *shape) for shape in self.inputs), *self.fixed]
        return [torch.randn(shape, dtype=self.dtype) for shape in shapes]


BODIES: dict[str, Body] = {}
STAY: dict[str, Body] = {}


def body(name: str, into: dict[str, Body] = BODIES, **facts: object) -> Callable[..., Callable[..., object]]:
    def register(run: Callable[..., object]) -> Callable[..., object]:
        into[name] = Body(run, **facts)
        return run

    return register


def state(x: Tensor, *shape: int) -> Tensor:
    return x.new_zeros(shape)


# ---- products of what changes from step to step --------------------------------------------------------------------

SQUARE = (WIDTH, WIDTH)


@body("attention over source positions", fixed=[(BATCH, SOURCE, WIDTH)], weights=(SQUARE, (2 * WIDTH, WIDTH)))
def attention(w: list[Tensor], x: Tensor, source: Tensor) -> object:
    h, outputs = state(x, BATCH, WIDTH), []
    for step in x:
        scores = torch.bmm(source, (h @ w[0]).unsqueeze(2)).squeeze(2)
        context = torch.bmm(F.softmax(scores, 1).unsqueeze(1), source).squeeze(1)
        h = torch.tanh(torch.cat([context, step], 1) @ w[1])
        outputs.append(h)
    return torch.stack(outputs)


@body("attention in heads over the last steps", fixed=[(BATCH, 4, WIDTH)], weights=(SQUARE, SQUARE))
def memory_of_heads(w: list[Tensor], x: Tensor, memory: Tensor) -> object:
    outputs = []
    for step in x:
        heads = (memory @ w[0]).view(BATCH, 4, 5, 4)
        weights = torch.einsum("bhd,bmhd->bhm", (step @ w[1]).view(BATCH, 5, 4), heads).softmax(-1)
        h = torch.tanh(torch.einsum("bhm,bmhd->bhd", weights, heads).reshape(BATCH, WIDTH))
        memory = torch.cat([memory[:, 1:], h.unsqueeze(1)], 1)
        outputs.append(h)
    return torch.stack(outputs)


@body("linear attention", inputs=[(BATCH, 7), (BATCH, 7), (BATCH, 6)])
def linear_attention(w: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> object:
    s, outputs = state(q, BATCH, 7, 6), []
    for t in range(q.shape[0]):
        s = 0.9 * s + k[t].unsqueeze(2) * v[t].unsqueeze(1)
        outputs.append((q[t].unsqueeze(1) @ s).squeeze(1))
    return torch.stack(outputs), s


@body("delta rule", inputs=[(BATCH, 7), (BATCH, 7), (BATCH, 6), (BATCH, 1)])
def delta_rule(w: list[Tensor], q: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> object:
    s, outputs = state(q, BATCH, 7, 6), []
    for t in range(q.shape[0]):
        key = F.normalize(k[t], dim=-1)
        wrong = torch.sigmoid(rate[t]) * (v[t] - torch.einsum("bkv,bk->bv", s, key))
        s = s + torch.einsum("bk,bv->bkv", key, wrong)
        outputs.append(torch.einsum("bkv,bk->bv", s, q[t]))
    return torch.stack(outputs)


@body("weighted keys and values in heads", inputs=[(BATCH, 2, 6)] * 3, weights=((2, 6), (2, 6)))
def receptance(w: list[Tensor], r: Tensor, k: Tensor, v: Tensor) -> object:
    s, outputs = state(r, BATCH, 2, 6, 6), []
    for t in range(r.shape[0]):
        kv = k[t].unsqueeze(-1) @ v[t].unsqueeze(-2)
        outputs.append((r[t].unsqueeze(-2) @ (s + w[0].unsqueeze(-1) * kv)).squeeze(-2))
        s = torch.exp(-torch.exp(w[1])).unsqueeze(-1) * s + kv
    return torch.stack(outputs)


@body("matrix memory", inputs=[(BATCH, 6), (BATCH, 6), (BATCH, 6), (BATCH, 1), (BATCH, 1)])
def matrix_memory(w: list[Tensor], q: Tensor, k: Tensor, v: Tensor, write: Tensor, keep: Tensor) -> object:
    c, n, m, outputs = state(q, BATCH, 6, 6), state(q, BATCH, 6), state(q, BATCH, 1), []
    for t in range(q.shape[0]):
        largest = torch.maximum(keep[t] + m, write[t])
        i, f, m = torch.exp(write[t] - largest), torch.exp(keep[t] + m - largest), largest
        c = f.unsqueeze(2) * c + i.unsqueeze(2) * (v[t].unsqueeze(2) @ k[t].unsqueeze(1))
        n = f * n + i * k[t]
        scale = (n * q[t]).sum(1, keepdim=True).abs().clamp(min=1)
        outputs.append((c @ q[t].unsqueeze(2)).squeeze(2) / scale)
    return torch.stack(outputs)


@body("selective scan", inputs=[(BATCH, 6, 4), (BATCH, 6, 4), (BATCH, 4)])
def selective_scan(w: list[Tensor], decay: Tensor, write: Tensor, read: Tensor) -> object:
    h, outputs = state(decay, BATCH, 6, 4), []
    for t in range(decay.shape[0]):
        h = torch.sigmoid(decay[t]) * h + write[t]
        outputs.append(torch.einsum("bdn,bn->bd", h, read[t]))
    return torch.stack(outputs, 1)


@body("gates over a graph", fixed=[(BATCH, SOURCE, SOURCE), (BATCH, SOURCE, WIDTH)], weights=(SQUARE, SQUARE))
def gated_graph(w: list[Tensor], x: Tensor, adjacency: Tensor, h: Tensor) -> object:
    for _ in range(x.shape[0]):
        received = adjacency @ (h @ w[0])
        gate = torch.sigmoid(received)
        h = gate * torch.tanh(received + h @ w[1]) + (1 - gate) * h
    return h


@body("matrix times vector", fixed=[SQUARE, (WIDTH,)])
def power_iteration(w: list[Tensor], x: Tensor, a: Tensor, v: Tensor) -> object:
    for _ in range(x.shape[0]):
        v = torch.mv(a, v)
        v = v / v.norm()
    return v, torch.dot(v, v)


@body("weight on the left", inputs=[(WIDTH, BATCH)], weights=(SQUARE,))
def columns(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        h = torch.tanh(w[0] @ h + step)
    return h


@body("weight of each step", inputs=[(BATCH, WIDTH), SQUARE])
def weight_of_each_step(w: list[Tensor], x: Tensor, weights: Tensor) -> object:
    h = x[0]
    for t in range(x.shape[0]):
        h = torch.tanh(h @ weights[t] + x[t])
    return h


@body("computed weight", weights=(SQUARE,))
def computed_weight(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        h = step + h @ torch.tanh(w[0] * h[:1])
    return h


@body("state times itself", fixed=[(BATCH, 6, 6)])
def squared(w: list[Tensor], x: Tensor, s: Tensor) -> object:
    for _ in range(x.shape[0]):
        s = torch.tanh(torch.baddbmm(s, s, s.transpose(1, 2), beta=0.5, alpha=0.1))
    return s


@body("product with factors", weights=(SQUARE, (WIDTH,)))
def factors(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        h = torch.tanh(torch.addmm(w[1], h, w[0], beta=2, alpha=0.25) + step)
    return h


@body("sum that is multiplied by zero", weights=(SQUARE,))
def ignored_addend(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        h = torch.tanh(torch.addmm(step / 0, h, w[0], beta=0))
    return h


# ---- dtypes --------------------------------------------------------------------------------------------------------


def elman(w: list[Tensor], x: Tensor) -> object:
    h, outputs = state(x, BATCH, WIDTH), []
    for step in x:
        h = torch.tanh(step + torch.addmm(w[1], h, w[0]))
        outputs.append(h)
    return torch.stack(outputs)


for dtype in (torch.float64, torch.bfloat16, torch.float16):
    body(f"product of {dtype}", dtype=dtype, weights=(SQUARE, (WIDTH,)))(elman)
    body(f"sums of products of {dtype}", dtype=dtype, inputs=[(BATCH, 7), (BATCH, 7), (BATCH, 6)])(linear_attention)


@body("product in float of a state in bfloat16", weights=(SQUARE,))
def mixed(w: list[Tensor], x: Tensor) -> object:
    h, outputs = state(x, BATCH, WIDTH).bfloat16(), []
    for step in x.bfloat16():
        h = torch.tanh(step + (h.float() @ w[0]).bfloat16())
        outputs.append(h)
    return torch.stack(outputs)


@body("product of integers", fixed=[(4, 4), (BATCH, 4)])
def integers(w: list[Tensor], x: Tensor, a: Tensor, n: Tensor) -> object:
    a, n = (a * 10).long(), (n * 10).long()
    for _ in range(x.shape[0]):
        n = n @ a % 1_000_003
    return n


# ---- positions -----------------------------------------------------------------------------------------------------


@body("greedy decoder", weights=(SQUARE, (WIDTH, 11), (11, WIDTH)))
def greedy(w: list[Tensor], x: Tensor) -> object:
    h, tokens = x[0], []
    token = torch.zeros(BATCH, dtype=torch.long)
    done = torch.zeros(BATCH, dtype=torch.bool)
    for _ in range(x.shape[0]):
        h = torch.tanh(F.embedding(token, w[2]) + h @ w[0])
        found = (h @ w[1]).argmax(1)
        done = done | (found == 2)
        token = torch.where(done, torch.ones_like(found), found)
        tokens.append(token)
    return torch.stack(tokens), done


@body("best path", weights=(SQUARE,))
def viterbi(w: list[Tensor], x: Tensor) -> object:
    score, pointers = x[0], []
    for t in range(1, x.shape[0]):
        score, came_from = (score.unsqueeze(2) + w[0]).max(1)
        score = score + x[t]
        pointers.append(came_from)
    tag = score.argmax(1)
    path = [tag]
    for came_from in reversed(pointers):
        tag = came_from.gather(1, tag.unsqueeze(1)).squeeze(1)
        path.append(tag)
    return torch.stack(path[::-1])


@body("look-up in what the step computes", weights=(SQUARE,))
def chosen(w: list[Tensor], x: Tensor) -> object:
    h, total = x[0], state(x, BATCH)
    for step in x:
        logits = F.log_softmax(h @ w[0], 1)
        best = logits.argmax(1, keepdim=True)
        total = total + logits.gather(1, best).squeeze(1)
        h = torch.tanh(step + best)
    return total


@body("look-up in a transposed weight", weights=((WIDTH, 9),))
def transposed_table(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        h = torch.tanh(h + step + w[0].t().index_select(0, h[:, :9].argmax(1)))
    return h


@body("edit distance")
def edit_distance(w: list[Tensor], x: Tensor) -> object:
    letters, other = (x[:, :, 0] > 0).long(), (x[0, :, :7] > 0).long()
    row = torch.arange(8).expand(BATCH, -1) + letters[0].unsqueeze(1)
    for letter in letters:
        cost = (letter.unsqueeze(1) != other).long()
        row = torch.cat([row[:, :1] + 1, torch.minimum(row[:, 1:] + 1, row[:, :-1] + cost)], 1)
    return row


@body("labels in a lattice")
def lattice(w: list[Tensor], x: Tensor) -> object:
    labels = (x[0].abs() * 5).long() % WIDTH
    alpha = x[0]
    for t in range(1, x.shape[0]):
        moved = F.pad(alpha[:, :-1], (1, 0), value=-1e4)
        alpha = torch.logaddexp(alpha, moved) + x[t].gather(1, labels)
    return alpha


# ---- other states and operators ------------------------------------------------------------------------------------


@body("convolutional LSTM", inputs=[(2, 3, 5, 4)], weights=((16, 7, 3, 3), (16,)))
def convolutional_lstm(w: list[Tensor], x: Tensor) -> object:
    h, c, outputs = state(x, 2, 4, 5, 4), state(x, 2, 4, 5, 4), []
    for step in x:
        i, f, g, o = F.conv2d(torch.cat([step, h], 1), w[0], w[1], padding=1).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs)


@body("convolution in groups with dilation", inputs=[(2, 6, 9)], weights=((6, 3, 3),))
def grouped_convolution(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        h = torch.tanh(F.conv1d(h, w[0], padding=2, dilation=2, groups=2) + step)
    return h


@body("convolution with a stride", inputs=[(2, 4, 8, 8)], weights=((16, 4, 2, 2),))
def strided_convolution(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        h = torch.tanh(F.pixel_shuffle(F.conv2d(h, w[0], stride=2), 2) + step)
    return h


@body("cells on a torus", fixed=[(2, 4, 6, 6)], weights=((8, 4, 3, 3), (4, 8, 1, 1)))
def cellular_automaton(w: list[Tensor], x: Tensor, h: Tensor) -> object:
    for _ in range(x.shape[0]):
        seen = F.relu(F.conv2d(F.pad(h, (1, 1, 1, 1), mode="circular"), w[0]))
        h = h + 0.1 * F.conv2d(seen, w[1]) + h.roll((1, -1), (2, 3))
    return h


@body("running sums", weights=(SQUARE,))
def running_sums(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        master = F.softmax(h @ w[0] + step, 1).cumsum(1)
        h = master * torch.tanh(step) + (1 - master) * h.cummax(1).values
    return h


@body("running sums over rows")
def running_sums_over_rows(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        h = torch.tanh(h.cumsum(0) * 0.1 + torch.sigmoid(step).cumprod(0))
    return h


@body("differential equation", weights=(SQUARE, SQUARE))
def runge_kutta(w: list[Tensor], x: Tensor) -> object:
    def slope(h: Tensor) -> Tensor:
        return torch.tanh(h @ w[0]) @ w[1]

    h, dt = x[0], 0.1
    for _ in range(x.shape[0]):
        k1 = slope(h)
        k2 = slope(h + dt / 2 * k1)
        k3 = slope(h + dt / 2 * k2)
        k4 = slope(h + dt * k3)
        h = h + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return h


@body("statistics over the batch", weights=(SQUARE,))
def statistics_over_rows(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        h = torch.tanh(h @ w[0] + step)
        h = (h - h.mean(0)) / (h.var(0) + 1e-3).sqrt()
    return h


@body("one number", inputs=[()])
def one_number(w: list[Tensor], x: Tensor) -> object:
    n, outputs = state(x), []
    for step in x:
        n = 0.9 * n + step
        outputs.append(n)
    return torch.stack(outputs)


@body("cross entropy of each step", weights=((WIDTH, WIDTH), (WIDTH, 7)))
def cross_entropy(w: list[Tensor], x: Tensor) -> object:
    h, loss = x[0], 0.0
    for step in x:
        h = torch.tanh(h @ w[0] + step)
        loss = loss + F.cross_entropy(h @ w[1], step.argmax(1) % 7, ignore_index=3)
    return loss, h


@pytest.mark.sampled
@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_one_kernel_at_every_length(name: str) -> None:
    torch.manual_seed(0)
    model, launches = BODIES[name].model(), []
    for length in LENGTHS:
        with torch.no_grad():
            report = assert_fuses(model, *BODIES[name].arguments(length))
        assert report.loops
        assert all(loop.launches_per_step_after == 0 for loop in report.loops)
        launches.append(report.after.launches)
    assert launches[0] == launches[1]


# ---- near misses ---------------------------------------------------------------------------------------------------


@body("transposed convolution", STAY, inputs=[(2, 4, 6)], weights=((4, 4, 3),))
def transposed_convolution(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        h = torch.tanh(F.conv_transpose1d(h, w[0], stride=2)[..., : h.shape[-1]] + step)
    return h


@body("positions of running maxima", STAY)
def positions_of_maxima(w: list[Tensor], x: Tensor) -> object:
    h = x[0]
    for step in x:
        best, at = (h + step).cummax(1)
        h = best * 0.1 + at
    return h


@body("equations solved in the step", STAY, fixed=[(WIDTH, WIDTH)])
def equations(w: list[Tensor], x: Tensor, a: Tensor) -> object:
    h, outputs = x[0], []
    matrix = a @ a.t() + torch.eye(WIDTH)
    for step in x:
        h = torch.tanh(torch.linalg.solve(matrix + torch.diag(h[0] ** 2), (step + h).t()).t())
        outputs.append(h)
    return torch.stack(outputs)


@body("complex numbers", STAY)
def complex_numbers(w: list[Tensor], x: Tensor) -> object:
    z = torch.complex(x[0], x[0])
    for step in x:
        z = z * 0.5 + step
    return z.abs()


@pytest.mark.parametrize("name", STAY)
def test_a_body_without_a_kernel_stays_and_is_right(name: str) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        report = assert_fuses(STAY[name].model(), *STAY[name].arguments(6))
    assert any(loop.launches_per_step_after for loop in report.loops)
    assert any(one.pass_name == "roll_loops" for one in report.rejected), report.rejected


def counted_up(w: list[Tensor], x: Tensor, position: Tensor) -> object:
    h = x[0]
    for step in x:
        h = torch.tanh(h + step * F.embedding(position, w[0]))
        position = position + 1
    return h


def test_a_position_that_leaves_the_table_raises_what_eager_raises() -> None:
    model = Body(counted_up, weights=((12, WIDTH),)).model()
    fused = fuse.compile(model)
    x, start = torch.randn(10, BATCH, WIDTH), torch.arange(BATCH)
    with torch.no_grad():
        torch.testing.assert_close(fused(x, start), model(x, start))
        assert not fused.last_run.fallbacks
        for wrong in (start + 1, start - 1):
            with pytest.raises(IndexError, match="index out of range"):
                model(x, wrong)
            with pytest.raises(IndexError, match="index out of range"):
                fused(x, wrong)


def test_what_is_not_a_number_spreads_as_in_eager() -> None:
    def running(w: list[Tensor], x: Tensor) -> object:
        h, at = x[0], []
        for step in x:
            h = (h + step).cummax(1).values + (h * step).cumsum(1) * 0.1
            at.append(h.argmax(1))
        return h, torch.stack(at)

    x = torch.randn(5, BATCH, WIDTH)
    x[2, 1, 3], x[3, 2, 4] = float("nan"), float("inf")
    with torch.no_grad():
        report = assert_fuses(Body(running).model(), x)
    assert [loop.launches_per_step_after for loop in report.loops] == [0]
