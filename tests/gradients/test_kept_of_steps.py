"""What loops keep of their steps for gradients: not what is cheap to compute again, nor rows that are only summed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.check.oracle import check
from fuse.gradients.differentiating import by_loops
from fuse.graph.backward.joint import capture_joint
from fuse.graph.backward.joint_graphs import Joint
from fuse.graph.loop import Loop

STEPS, BATCH, WIDTH = 8, 3, 6


class Scan(nn.Module):
    """``run(weight, x, h)`` in each step; the last state is the result."""

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor], Tensor], *size: int, steps: int = STEPS) -> None:
        super().__init__()
        self.run, self.steps = run, steps
        self.weight = nn.Parameter(torch.rand(size or (WIDTH, WIDTH)))

    def forward(self, xs: Tensor, h: Tensor) -> Tensor:
        for t in range(self.steps):
            h = self.run(self.weight, xs[t], h)
        return h


def crf(weight: Tensor, x: Tensor, h: Tensor) -> Tensor:
    return torch.logsumexp(h.unsqueeze(2) + weight, dim=1) + x


def selective(weight: Tensor, x: Tensor, h: Tensor) -> Tensor:
    """The state is (BATCH, WIDTH, WIDTH)."""
    return torch.exp(-weight * x.unsqueeze(2)) * h + x.unsqueeze(2) * x.unsqueeze(1)


def read_by_row(weight: Tensor, x: Tensor, h: Tensor) -> Tensor:
    """The next state is read by a product whose result is no gradient of a weight."""
    h = torch.sigmoid(weight) * h + (x * x).unsqueeze(2)
    return h + torch.bmm(h, x.unsqueeze(2))


def joint_of(model: nn.Module, *args: Tensor) -> Joint:
    joint = capture_joint(model, args, differentiate=by_loops())
    assert joint.rolled
    return joint


def loops(graph: nn.Module) -> list[Loop]:
    return [module for module in graph.modules() if isinstance(module, Loop)]


def kept(joint: Joint) -> list[tuple[int, ...]]:
    """The sizes of what the forward loop keeps of a step for the backward one."""
    (loop,) = loops(joint.forward)
    (node,) = loop.body.graph.find_nodes(op="output")
    return sorted(tuple(one.meta["val"].shape) for one in node.args[0][loop.spec.carries :])


def args(*state: int, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    return torch.randn(steps, BATCH, WIDTH, requires_grad=True), torch.randn(BATCH, *state, requires_grad=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def assert_right(model: nn.Module, *given: Tensor) -> None:
    report = check(model, given, train=True)
    assert report.passed, report
    assert not report.fallbacks


def doubled(weight: Tensor, x: Tensor, h: Tensor) -> Tensor:
    """The difference is as large as the weight for each row of the state, and its square is read too."""
    difference = h.unsqueeze(2) - weight
    return torch.tanh(difference * difference * weight).sum(1) / WIDTH + x


def test_arithmetic_of_a_state_and_of_a_weight_that_is_read_is_done_again() -> None:
    model, given = Scan(doubled), args(WIDTH)
    assert kept(joint_of(model, *given)) == [(BATCH, WIDTH), (BATCH, WIDTH, WIDTH)]  # the state and the tanh
    assert_right(model, *given)


def test_a_weight_that_eager_does_not_read_backwards_may_be_written_before() -> None:
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model, given = Scan(crf), args(WIDTH)
        run = fuse.compile(model) if compiled else model
        for _ in range(2):
            model.zero_grad()
            result = run(*given)
            with torch.no_grad():
                model.weight.add_(1)
            model.weight.data.mul_(2)
            given[0].data.add_(3)
            result.square().sum().backward()
        found.append([model.weight.grad, *(a.grad for a in given)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_the_next_state_is_computed_again_of_the_one_before() -> None:
    model, given = Scan(read_by_row), args(WIDTH, WIDTH)
    assert kept(joint_of(model, *given)) == [(BATCH, WIDTH, WIDTH)]  # the state alone
    assert_right(model, *given)


@pytest.mark.parametrize(
    ("run", "sizes"),
    [
        # costly arithmetic is kept
        (lambda w, x, h: torch.exp(h.unsqueeze(2) + w).sum(1), [(BATCH, WIDTH, WIDTH)]),
        # what eager does not read backwards may be written before, and is not read either
        (lambda w, x, h: torch.logsumexp(h.unsqueeze(2) + w, 1) + x, [(BATCH, WIDTH), (BATCH, WIDTH, WIDTH)]),
        # what a product contracts for all steps at once is needed for all of them
        (lambda w, x, h: torch.tanh((h + x) @ w), [(BATCH, WIDTH), (BATCH, WIDTH)]),
    ],
    ids=["costly", "of a weight that is not read", "contracted"],
)
def test_near_misses_are_kept(run: Callable[..., Tensor], sizes: list[tuple[int, ...]]) -> None:
    model, given = Scan(run), args(WIDTH)
    assert kept(joint_of(model, *given)) == sizes
    assert_right(model, *given)


def of_all_steps(joint: Joint) -> list[tuple[int, ...]]:
    """The sizes of what the reversed loop keeps of a step."""
    assert joint.backward is not None
    (loop,) = loops(joint.backward)
    (node,) = loop.body.graph.find_nodes(op="output")
    return [tuple(one.meta["val"].shape) for one in node.args[0][loop.spec.carries :]]


@pytest.mark.parametrize(
    ("run", "state"), [(crf, (WIDTH,)), (selective, (WIDTH, WIDTH))], ids=["crf", "selective scan"]
)
def test_rows_that_are_only_summed_are_added_up_from_step_to_step(
    run: Callable[..., Tensor], state: tuple[int, ...]
) -> None:
    model, given = Scan(run), args(*state)
    assert (BATCH, WIDTH, WIDTH) not in of_all_steps(joint_of(model, *given))
    assert_right(model, *given)
    assert_right(model.double(), *(a.detach().double().requires_grad_() for a in given))


def test_two_sums_of_the_same_rows_are_two_gradients() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(1, WIDTH))

        def forward(self, xs: Tensor, h: Tensor) -> Tensor:
            for t in range(STEPS):
                h = torch.tanh(h * xs[t] + self.one + self.other)
            return h

    given = args(WIDTH)
    assert_right(Two(), *given)
    report = check(Two(), (given[0].detach(), given[1].detach()), train=True)
    assert report.passed, report


@pytest.mark.parametrize(
    "run",
    [
        lambda w, x, h: torch.tanh(h @ w + w[0]),  # the product keeps the rows anyway
        lambda w, x, h: torch.tanh(h * x + w[0] + x),  # the gradients of what the steps read are these rows
    ],
    ids=["of a product", "of what steps read"],
)
def test_rows_that_are_there_anyway_are_not(run: Callable[..., Tensor]) -> None:
    model, given = Scan(run), args(WIDTH)
    assert (BATCH, WIDTH) in of_all_steps(joint_of(model, *given))
    assert_right(model, *given)


def test_rows_of_a_narrow_dtype_are_kept() -> None:
    narrow, given = Scan(selective).bfloat16(), args(WIDTH, WIDTH)
    taken = [a.detach().bfloat16().requires_grad_() for a in given]
    assert (BATCH, WIDTH, WIDTH) in of_all_steps(joint_of(narrow, *taken))
    assert_right(narrow, *taken)


def test_many_rows_are_added_up() -> None:
    model = Scan(crf, 32, 32, steps=16)
    xs, h = torch.randn(16, 8, 32, requires_grad=True), torch.randn(8, 32, requires_grad=True)
    assert (8, 32, 32) not in of_all_steps(joint_of(model, xs, h))
    assert_right(model, xs, h)
