"""Loops are differentiated rolled: autograd runs over the body of one step; the reversed loop is built from that."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.gradients.differentiating import NAME, by_loops
from fuse.graph.backward.joint import capture_joint

STEPS, BATCH, WIDTH = 9, 3, 5


class LSTM(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.inner, self.state = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, xs: Tensor) -> tuple[Tensor, Tensor]:
        h = c = xs.new_zeros(xs.shape[1], self.width)
        outputs = []
        for x in xs:
            i, f, g, o = (self.inner(x) + self.state(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), c


class Model(nn.Module):
    """``run(weight, *args)``."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, *args: Tensor) -> Tensor:
        return self.run(self.weight, *args)


def tensors(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def gradients(run: Callable[..., object], model: nn.Module, *args: Tensor) -> list[Tensor | None]:
    own = [a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args]
    model.zero_grad()
    results = [t for t in tensors(run(*own)) if t.requires_grad]
    sum((t * t.detach().cos()).sum() for t in results).backward()
    return [*(a.grad for a in own), *(p.grad for p in model.parameters())]


def assert_trains_rolled(model: nn.Module, *args: Tensor, rolled: bool = True) -> None:
    """Gradients are as near to float64 as eager's, with nothing run as a fallback."""
    joint = capture_joint(model, args, differentiate=by_loops())
    assert joint.rolled is rolled, joint.forward.meta.get("ledger")
    fused = fuse.compile(model)
    found = gradients(fused, model, *args)
    run = fused.last_run
    assert run.fallbacks == ()
    assert run.backward.fallbacks == ()
    plain = copy.deepcopy(model)
    eager = gradients(plain, plain, *args)
    best = copy.deepcopy(model).double()
    exact = gradients(best, best, *(a.double() if a.is_floating_point() else a for a in args))
    for mine, theirs, true in zip(found, eager, exact, strict=True):
        if theirs is None or mine is None or true is None:
            assert mine is theirs is true
            continue
        assert mine.stride() == theirs.stride()
        allowed = 2 * (theirs - true).abs().max() + 1e-5 * (1 + true.abs().max())
        assert (mine - true).abs().max() <= allowed


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_launches_of_a_training_step_do_not_grow_with_the_steps() -> None:
    model, launches = LSTM(16), []
    for steps in (64, 512):
        fused = fuse.compile(model)
        outputs, last = fused(torch.randn(steps, 2, 16))
        (outputs.sum() + last.sum()).backward()
        run = fused.last_run
        launches.append((run.launches, run.backward.launches))
    assert launches[0] == launches[1]
    assert sum(launches[0]) <= 12


def lagging(w: Tensor, xs: Tensor) -> Tensor:
    a = b = xs.new_zeros(BATCH, WIDTH)
    for x in xs:
        a, b = torch.tanh(x + a @ w + b), a
    return a + b


def some_steps(w: Tensor, xs: Tensor) -> Tensor:
    h, kept = xs.new_zeros(BATCH, WIDTH), []
    for t in range(1, STEPS - 1):
        h = torch.tanh(xs[t] + h @ w)
        kept.append(h)
    return torch.stack(kept, 1)


def backwards(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for t in range(STEPS)[::-1]:
        h = torch.tanh(xs[t] @ w + h @ w)
    return h


def every_other_step(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for t in range(0, STEPS, 2):
        h = torch.tanh(xs[t] + h @ w)
    return h


def batch_first(w: Tensor, xs: Tensor) -> Tensor:
    h, kept = xs.new_zeros(xs.shape[0], WIDTH), []
    for t in range(xs.shape[1]):
        h = torch.tanh(xs[:, t] + h @ w)
        kept.append(h)
    return torch.stack(kept, 1)


def attention(w: Tensor, xs: Tensor, memory: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for x in xs:
        scores = torch.softmax((memory * (h @ w).unsqueeze(1)).sum(2), 1)
        h = torch.tanh(x + torch.bmm(scores.unsqueeze(1), memory).squeeze(1))
    return h


def weight_used_in_two_ways(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for x in xs:
        h = torch.tanh(x @ w.t() + h @ w + w[0] + h * w.sum(0))
    return h


def masked(w: Tensor, xs: Tensor, mask: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for x, on in zip(xs, mask, strict=True):
        h = torch.where(on.unsqueeze(1), torch.tanh(x + h @ w), h)
    return h


def two_loops(w: Tensor, xs: Tensor) -> Tensor:
    return some_steps(w, some_steps(w, xs).transpose(0, 1).repeat(2, 1, 1)).sum(1)


def normalised(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for x in xs:
        h = F.layer_norm(torch.tanh(x + h @ w), (WIDTH,), w[0], w[1])
    return h


def sum_of_squares(w: Tensor, xs: Tensor) -> Tensor:
    h, loss = xs.new_zeros(BATCH, WIDTH), xs.new_zeros(())
    for x in xs:
        h = torch.tanh(x + h @ w)
        loss = loss + (h @ w).square().mean()
    return loss


def largest(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for x in xs:
        h = torch.tanh(x + h @ w)
        h = h + h.max(1, keepdim=True).values - 0.3 * h.min(0).values
    return h


def looked_up(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for x in xs:
        h = torch.tanh(x + h @ w)
        h = h * h.gather(1, x.argmax(1, keepdim=True))
    return h


XS = (STEPS, BATCH, WIDTH)
ROLLED = {
    lagging: [XS],
    some_steps: [XS],
    backwards: [XS],
    every_other_step: [XS],
    batch_first: [(BATCH, STEPS, WIDTH)],
    attention: [XS, (BATCH, 7, WIDTH)],
    weight_used_in_two_ways: [XS],
    two_loops: [XS],
    normalised: [XS],
    sum_of_squares: [XS],
    largest: [XS],
    looked_up: [XS],
}


@pytest.mark.sampled
@pytest.mark.parametrize("run", ROLLED, ids=lambda run: run.__name__)
def test_gradients_of_a_rolled_loop_are_eagers(run: Callable[..., Tensor]) -> None:
    assert_trains_rolled(Model(run), *(torch.randn(shape) for shape in ROLLED[run]))


def test_masks_are_read_backwards_too() -> None:
    assert_trains_rolled(Model(masked), torch.randn(XS), torch.rand(STEPS, BATCH) > 0.5)


def cut_in_the_loop(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for x in xs:
        h = torch.tanh(x + h.detach() @ w)
    return h


def without_gradients(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for x in xs:
        with torch.no_grad():
            gate = torch.sigmoid(h @ w)
        h = torch.tanh(x + gate * h)
    return h


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return 2 * g


def own_gradients(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for x in xs:
        h = Twice.apply(torch.tanh(x + h @ w))
    return h


def cut_in_place(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for x in xs:
        gate = torch.sigmoid(x + h @ w) * 1
        gate.detach_()
        h = gate.sin() + x @ w
    return h


@pytest.mark.parametrize("run", [cut_in_the_loop, cut_in_place, without_gradients, own_gradients])
def test_what_operators_alone_do_not_tell_is_differentiated_step_by_step(run: Callable[..., Tensor]) -> None:
    assert_trains_rolled(Model(run), torch.randn(XS), rolled=False)


def turned(w: Tensor, xs: Tensor) -> Tensor:
    h, order = xs.new_zeros(BATCH, WIDTH), torch.tensor([0, 2, 1, 4, 3])
    for x in xs:
        h = torch.tanh(x + h @ w)
        h = h + h[:, order]
    return h


def put(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for t, x in enumerate(xs):
        h = h.index_put((torch.tensor([t % 3, 1]),), torch.tanh(x + h @ w)[:2])
    return h


def test_a_report_says_why_a_loop_is_not_differentiated_rolled() -> None:
    report = fuse.show(Model(put), (torch.randn(XS),), train=True)
    reasons = [r.reason for r in report.rejected if r.pass_name == NAME]
    assert reasons == ["several rows are written at computed positions"]


Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

LOOK_UPS: dict[str, Step] = {  # of h, w (which is looked up, too), x, and positions i, j
    "rows of a table": lambda h, w, x, i, j: torch.tanh(h @ w + w[i] * w[j] + x),
    "columns of a table": lambda h, w, x, i, j: torch.tanh(h @ w + w[:, i].t() + x),
    "selected rows of a table": lambda h, w, x, i, j: torch.tanh(h @ w + w.index_select(0, i) + x),
    "selected columns of a table": lambda h, w, x, i, j: torch.tanh(h @ w + w.index_select(-1, i).t() + x),
    "rows of the state, some twice": lambda h, w, x, i, j: torch.tanh(h[i % BATCH] @ w + x),
    "columns of the state": lambda h, w, x, i, j: torch.tanh(h.index_select(1, torch.arange(WIDTH).flip(0)) @ w + x),
    "shifts": lambda h, w, x, i, j: torch.tanh(F.pad((h @ w)[:, :-1], (1, 0)) + F.pad(h[:, 2:], (0, 2), value=0.5) + x),
    "absolute values": lambda h, w, x, i, j: torch.tanh((h @ w + x).abs() - 0.5),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LOOK_UPS)
def test_look_ups_shifts_and_signs_in_a_step_are_differentiated_rolled(name: str) -> None:
    def run(w: Tensor, xs: Tensor, places: Tensor) -> Tensor:
        h = torch.zeros(BATCH, WIDTH)
        for x, (i, j) in zip(xs, places, strict=True):
            h = LOOK_UPS[name](h, w, x, i, j)
        return h

    launches_grow_not(run)


class GroupNormed(nn.Module):
    """The state is normalised by groups of its units, as in a retentive network."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.GroupNorm(3, 6, affine=affine)

    def forward(self, xs: Tensor) -> Tensor:
        h = xs[0]
        for x in xs:
            h = h * 0.5 + self.norm(torch.tanh(self.linear(h) + x))
        return h


@pytest.mark.sampled
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("special", [torch.nan, -0.0, 1.0])
def test_group_norms_of_steps_are_differentiated_rolled(affine: bool, special: float) -> None:
    launches = []
    for steps in (STEPS, 2 * STEPS):
        xs = torch.randn(steps, BATCH, 6)
        xs[2, 1] = special
        report = check(GroupNormed(affine).double(), (xs.double().requires_grad_(),), train=True)
        assert report.passed, report
        launches.append(report.launches_after)
    assert launches[0] == launches[1] <= 8
    assert check(GroupNormed(affine), (xs[:STEPS].requires_grad_(),), train=True).passed


def test_group_norms_in_half_precision_are_left_to_the_library() -> None:
    """It adds in float32; the operators of the formula would round in between."""
    xs = torch.randn(STEPS, BATCH, 6, dtype=torch.bfloat16)
    report = fuse.show(GroupNormed().bfloat16(), (xs,), train=True)
    assert any("native_group_norm_backward" in one.reason for one in report.rejected)


@pytest.mark.parametrize("place", [(slice(None), 0), (0,), (slice(None), slice(1, 3)), (slice(None, None, 2), -1)])
def test_a_write_into_a_large_product_that_leaves_the_loop_has_eagers_gradient(place: tuple[slice | int, ...]) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = nn.Linear(64, 64), nn.Linear(WIDTH, WIDTH)

        def forward(self, xs: Tensor) -> tuple[Tensor, Tensor]:
            h, kept = xs.new_zeros(BATCH, WIDTH), []
            for x in xs:
                y = self.outer(x)
                y[place] = x[place] * 2
                h = torch.tanh(self.inner(h) + 1)
                kept.append(y)
            return torch.stack(kept), h

    report = check(Written(), (torch.randn(STEPS, 5, 64, requires_grad=True),), train=True)
    assert report.passed, report


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda p, t: F.cross_entropy(p, t, reduction="sum"),
    "weighted": lambda p, t: F.cross_entropy(p, t, weight=torch.arange(1.0, WIDTH + 1)),
    "some ignored": lambda p, t: F.cross_entropy(p, t, ignore_index=2),
    "of each row": lambda p, t: F.cross_entropy(p, t, reduction="none").square().sum(),
    "and another": lambda p, t: F.cross_entropy(p, t) + p.square().mean(),
    "of one row": lambda p, t: F.cross_entropy(p[0], t[0]),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_steps_are_differentiated_rolled(name: str) -> None:
    def run(w: Tensor, xs: Tensor, places: Tensor) -> Tensor:
        h, loss = torch.zeros(BATCH, WIDTH), torch.zeros(())
        for x, (i, _) in zip(xs, places, strict=True):
            h = torch.tanh(h @ w + x)
            loss = loss + LOSSES[name](h @ w, i)
        return loss

    launches_grow_not(run)


def launches_grow_not(run: Callable[..., Tensor]) -> None:
    model, launches = Model(run), []
    for steps in (2 * STEPS, STEPS):
        args = torch.randn(steps, BATCH, WIDTH), torch.randint(WIDTH, (steps, 2, BATCH))
        report = fuse.show(model, args, train=True)
        assert report.backward is not None
        assert not [r.reason for r in report.rejected if r.pass_name == NAME]
        launches.append((report.after.launches, report.backward.after.launches))
    assert launches[0] == launches[1]
    assert sum(launches[0]) <= 8
    args[0].requires_grad_()
    checked = check(model, args, train=True)
    assert checked.passed, str(checked)
    assert not checked.fallbacks


def test_two_sums_over_steps_in_one_state_are_one_sum_behind_the_loop() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(192, 96), nn.Linear(96, 200)

        def forward(self, xs: Tensor, targets: Tensor) -> Tensor:
            h, loss = torch.zeros(4, 96), torch.zeros(())
            for x, target in zip(xs, targets, strict=True):
                h = torch.tanh(self.cell(torch.cat([x, h], 1)))
                scores = self.head(h)
                loss = loss + F.cross_entropy(scores, target) + scores.square().mean()
            return loss

    launches = []
    for steps in (2 * STEPS, 4 * STEPS):
        args = torch.randn(steps, 4, 96), torch.randint(200, (steps, 4))
        report = fuse.show(Tagger(), args, train=True)
        (loop,) = report.loops
        assert loop.launches_per_step_after == 0
        launches.append((report.after.launches, report.backward.after.launches))
    assert launches[0] == launches[1]
    checked = check(Tagger(), args, train=True)
    assert checked.passed, str(checked)


def test_names_of_constants_do_not_clash_where_a_graph_runs_as_python() -> None:
    model, xs = Model(turned), torch.randn(XS)
    fused = fuse.compile(model)
    mine = torch.autograd.functional.jacobian(fused, xs, vectorize=True)
    torch.testing.assert_close(mine, torch.autograd.functional.jacobian(model, xs))


def test_what_a_loop_collects_may_be_written_by_the_caller() -> None:
    model = LSTM()
    fused = fuse.compile(model)
    outputs, _ = fused(torch.randn(XS))
    outputs.mul_(2)
    outputs.sum().backward()


def test_an_unused_result_costs_no_gradients() -> None:
    model, xs = LSTM(), torch.randn(XS)
    fused = fuse.compile(model)
    found = []
    for run in (fused, model):
        model.zero_grad()
        run(xs)[1].sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) == 4
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@settings(max_examples=6, deadline=None)
@given(st.integers(4, 12), st.integers(1, 5), st.integers(1, 17), st.booleans())
def test_any_size_trains(steps: int, batch: int, width: int, turned: bool) -> None:
    xs = torch.randn(batch, steps, width).transpose(0, 1) if turned else torch.randn(steps, batch, width)
    assert_trains_rolled(LSTM(width), xs)


class Counting(nn.Module):
    """The first state of the loop is an integer; a vector is looked up at it, and its gradient added up."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        count = torch.zeros(xs.shape[1], dtype=torch.long)
        for x in xs:
            count = (count * 2 + 1) % 7
            h = torch.tanh(x + h * self.scale[count % WIDTH][:, None])
        return h


def test_gradients_are_added_up_in_their_own_dtype() -> None:
    args = torch.randn(XS), torch.randn(BATCH, WIDTH, requires_grad=True)
    report = check(Counting(), args, train=True)
    assert report.passed, str(report)
    assert capture_joint(Counting(), args, differentiate=by_loops()).rolled


class TwoChains(nn.Module):
    """Two recurrences that know nothing of each other, one loop, each with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, xs: Tensor) -> tuple[Tensor, Tensor]:
        a = b = xs.new_zeros(BATCH, WIDTH)
        for x in xs:
            a, b = torch.tanh(x + self.first(a)), torch.sin(x + self.second(b))
        return a, b


@pytest.mark.parametrize("used", [0, 1])
def test_weights_of_unused_results_get_no_gradient(used: int) -> None:
    model, xs = TwoChains(), torch.randn(XS)
    assert capture_joint(model, (xs,), differentiate=by_loops()).rolled
    fuse.compile(model)(xs)[used].sum().backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(xs)[used].sum().backward()
    for mine, theirs in zip(found, (p.grad for p in model.parameters()), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs)


class Counted(nn.Module):
    """A state that leads to a result by ``argmax`` only, and two that change places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, xs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = torch.zeros(BATCH, dtype=torch.long)
        h = a = b = xs.new_zeros(BATCH, WIDTH)
        for x in xs:
            h = torch.tanh(x + self.first(h))
            count = count + h.argmax(1)
            a, b = torch.sin(b + x), torch.tanh(self.second(a))
        return a, b, count


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_state_that_no_gradient_reaches_gives_none(used: tuple[int, ...]) -> None:
    model, xs = Counted(), torch.randn(XS)
    assert capture_joint(model, (xs,), differentiate=by_loops()).rolled
    results = fuse.compile(model)(xs)
    sum(results[i].sum() for i in used).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    results = model(xs)
    sum(results[i].sum() for i in used).backward()
    assert [g is None for g in found] == [True, True, False, False]
    for mine, theirs in zip(found[2:], (p.grad for p in model.second.parameters()), strict=True):
        torch.testing.assert_close(mine, theirs)


def noisy_behind(w: Tensor, xs: Tensor) -> Tensor:
    h = xs.new_zeros(BATCH, WIDTH)
    for x in xs:
        h = torch.tanh(x + h @ w)
    return F.rrelu(h, training=True)


def test_numbers_that_a_gradient_needs_are_those_drawn() -> None:
    torch.manual_seed(0)
    report = check(Model(noisy_behind), (torch.randn(XS, requires_grad=True),), train=True)
    assert report.passed, str(report)


class FirstStepApart(nn.Module):
    """A cell that writes its gates in place, once before the loop (whose input the model chooses) and then in it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.cell = nn.GRUCell(8, 8)
        self.out = nn.Linear(8, 20)

    def forward(self, token: Tensor, h: Tensor) -> Tensor:
        scores = []
        for _ in range(6):
            h = self.cell(self.table(token), h)
            scores.append(self.out(h))
            token = scores[-1].argmax(-1)
        return torch.stack(scores, 1)


def test_values_written_in_place_before_a_loop_keep_their_gradients() -> None:
    report = check(FirstStepApart(), (torch.randint(0, 20, (3,)), torch.randn(3, 8, requires_grad=True)), train=True)
    assert report.passed, str(report)
    assert report.observed[1] < 10, "the loop was rolled"


class WrittenTransposed(nn.Module):
    """A state that is written through its transpose, and copied in each step: the copies lie as the first did."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.zeros(4, 6)
        for step in x:
            turned = y.t()
            turned.add_(step.t())
            flat = turned.reshape(-1)
            y = y.clone()
        return y, flat


def test_results_lie_as_eagers_whatever_the_loop_makes_of_them() -> None:
    model, x = WrittenTransposed(), torch.randn(4, 4, 6, requires_grad=True)
    for mine, theirs in zip(fuse.compile(model)(x), model(x), strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs)
