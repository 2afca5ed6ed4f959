"""What a training step saves lies in memory that later steps use again, never in memory that somebody still holds."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuse
from fuse.check.oracle import check
from fuse.graph.function import Function
from fuse.runtime.programs import saved_memory

ROWS, WIDTH = 64, 256  # 64 KB a value


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) * torch.sigmoid(x + self.scale)


class Called(Gated):
    """Calls an operator of a library."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).cumsum(0)


@pytest.fixture(autouse=True)
def _no_blocks() -> Iterator[None]:
    torch.manual_seed(0)
    saved_memory.forget()
    yield
    saved_memory.forget()


def inner(y: Tensor) -> list[Tensor]:
    """The saved tensors that lie in blocks."""
    blocks = [(b.storage.data_ptr(), b.bytes) for b in saved_memory._blocks]
    saved = y.grad_fn.saved_tensors
    return [t for t in saved if any(start <= t.data_ptr() < start + size for start, size in blocks)]


def gradient(run: Callable[[Tensor], Tensor], model: Gated, x: Tensor) -> Tensor:
    model.zero_grad()
    run(x).square().sum().backward()
    assert model.scale.grad is not None
    return model.scale.grad.clone()


@pytest.mark.parametrize("make", [Gated, Called])
def test_a_later_step_uses_the_memory_of_one_before(make: type[Gated]) -> None:
    model = make()
    fused = fuse.compile(model)
    places = []
    for _ in range(4):
        y = fused(torch.randn(ROWS, WIDTH))
        places.append([t.data_ptr() for t in inner(y)])
        y.square().sum().backward()
        del y
    assert fused.last_run.fallbacks == ()
    assert len(saved_memory._blocks) == 1
    assert places[0]
    assert places == places[:1] * 4


@pytest.mark.parametrize("make", [Gated, Called])
def test_training_in_blocks_is_right(make: type[Gated]) -> None:
    report = check(make(), (torch.randn(ROWS, WIDTH),), train=True)
    assert report.passed, report
    assert not report.fallbacks


def test_gradients_that_are_copied_lie_in_blocks_until_nobody_holds_them() -> None:
    fused = fuse.compile(Function(lambda x: x + 1.0))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    held = []
    for number in range(3):
        turned = torch.full((WIDTH, ROWS), float(number)).t()
        held.append(torch.autograd.grad(fused(x), x, turned)[0])
    for number, gradient in enumerate(held):
        assert torch.equal(gradient, torch.full((ROWS, WIDTH), float(number)))
    del gradient, held
    before = len(saved_memory._blocks)
    assert before >= 1
    for _ in range(3):
        fused(x).sum().backward()
        x.grad = None
    assert len(saved_memory._blocks) == before


def test_a_gradient_that_is_one_number_is_copied_when_the_number_changes() -> None:
    model = Gated()
    plain, fused = copy.deepcopy(model), fuse.compile(model)
    x, copies = torch.randn(ROWS, WIDTH), []
    for scale in (1.0, 1.0, -2.0, -2.0, 0.0):
        model.zero_grad()
        plain.zero_grad()
        (plain(x).sum() * scale).backward()
        (fused(x).sum() * scale).backward()
        torch.testing.assert_close(model.scale.grad, plain.scale.grad)
        copies.append(fused.last_run.backward.aten)
    assert copies == [1, 0, 1, 0, 1]


@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: (y.mT * torch.linspace(-1, 1, 22)[:, None]).sum()])
def test_a_gradient_that_the_library_alone_reads_is_not_copied(loss: Callable[[Tensor], Tensor]) -> None:
    model, x = nn.Conv2d(32, 48, 3, bias=False), torch.randn(2, 32, 24, 24)
    fused = fuse.compile(model)
    loss(fused(x)).backward()
    assert model.weight.grad is not None
    found, model.weight.grad = model.weight.grad, None
    loss(model(x)).backward()
    torch.testing.assert_close(found, model.weight.grad)
    assert (fused.last_run.backward.launches, fused.last_run.backward.aten) == (1, 1)


def test_a_gradient_without_memory_is_written_out() -> None:
    model = Gated()
    x = torch.randn(ROWS, WIDTH)
    fuse.compile(model)(x).backward(torch._efficientzerotensor((ROWS, WIDTH)))
    assert torch.equal(model.scale.grad, torch.zeros(WIDTH))


def test_a_graph_that_is_kept_keeps_its_memory() -> None:
    model = Gated()
    plain, fused = copy.deepcopy(model), fuse.compile(model)
    xs = [torch.randn(ROWS, WIDTH) for _ in range(5)]
    wanted = [gradient(plain, plain, x) for x in xs]
    results = [fused(x) for x in xs]  # five graphs at once
    assert len(saved_memory._blocks) == 5
    for y, want in reversed(list(zip(results, wanted, strict=True))):
        for again in range(2):
            model.zero_grad()
            y.square().sum().backward(retain_graph=not again)
            torch.testing.assert_close(model.scale.grad, want)
    del y, results
    for x, want in zip(xs, wanted, strict=True):
        torch.testing.assert_close(gradient(fused, model, x), want)
    assert len(saved_memory._blocks) == 5


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensors: tensors,
        lambda tensors: [t[1:, ::2] for t in tensors],
        lambda tensors: [t.numpy() for t in tensors],
        lambda tensors: [t.untyped_storage() for t in tensors],
        lambda tensors: [t.untyped_storage() for t in tensors[:1]],
        lambda tensors: [memoryview(t.numpy()) for t in tensors],
    ],
    ids=["tensors", "views", "arrays", "storages", "one storage", "buffers"],
)
def test_whoever_holds_what_is_saved_keeps_it(hold: Callable[[list[Tensor]], object]) -> None:
    fused = fuse.compile(Gated())
    fused(torch.randn(ROWS, WIDTH)).sum().backward()
    y = fused(torch.randn(ROWS, WIDTH))
    saved = inner(y)
    assert len(saved) >= 2
    places, values = [t.data_ptr() for t in saved], [t.clone() for t in saved]
    held = hold(saved)
    y.sum().backward()
    del y, saved
    for _ in range(3):
        y = fused(torch.randn(ROWS, WIDTH))
        assert not set(places) & {t.data_ptr() for t in inner(y)}
        y.sum().backward()
        del y
    block = next(b for b in saved_memory._blocks if not b.is_free())
    for place, value in zip(places, values, strict=True):
        first, memory = place - block.storage.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(block.storage)
        assert torch.equal(memory[first : first + value.nbytes].view(torch.float32).view_as(value), value)
    del held, memory
    assert all(b.is_free() for b in saved_memory._blocks)


def test_a_write_to_what_is_saved_is_noticed_in_its_step_alone() -> None:
    model = Gated()
    plain, fused = copy.deepcopy(model), fuse.compile(model)
    x = torch.randn(ROWS, WIDTH)
    gradient(fused, model, x)
    y = fused(x)
    inner(y)[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    del y
    torch.testing.assert_close(gradient(fused, model, x), gradient(plain, plain, x))


def test_threads_have_blocks_of_their_own() -> None:
    model = Gated()
    plain, fused = copy.deepcopy(model), fuse.compile(model)
    xs = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(4)]
    wanted = [torch.autograd.grad(plain(x).square().sum(), x)[0] for x in xs]
    torch.autograd.grad(fused(xs[0]).square().sum(), xs[0])
    wrong = []

    def work(i: int) -> None:
        for _ in range(40):
            (found,) = torch.autograd.grad(fused(xs[i]).square().sum(), xs[i])
            if not torch.allclose(found, wanted[i], atol=1e-5):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(saved_memory._blocks) <= 4


def test_programs_of_about_one_size_share_a_block_and_others_have_one_of_their_own() -> None:
    fused = fuse.compile(Gated(), dynamic_shapes=None)
    for rows in (64, 60, 56, 600, 64, 60):
        y = fused(torch.randn(rows, WIDTH))
        y.square().sum().backward()
        del y
    assert len(saved_memory._blocks) == 2


def test_blocks_that_no_call_uses_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_memory, "MOST_UNUSED", 3)
    fused = fuse.compile(Gated())
    results = [fused(torch.randn(ROWS, WIDTH)) for _ in range(3)]
    assert len(saved_memory._blocks) == 3
    del results
    for _ in range(5):
        fused(torch.randn(ROWS, WIDTH))
    assert len(saved_memory._blocks) == 1
    del fused
    gc.collect()
    assert not saved_memory._blocks


def test_little_that_is_saved_lies_in_no_block() -> None:
    fused = fuse.compile(Gated())
    fused(torch.randn(3, WIDTH)).sum().backward()
    assert not saved_memory._blocks


def test_a_hook_of_saved_tensors_that_raises() -> None:
    """The call has run: it does not run eager once more, and the hook's error is the caller's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8))
    expected, fused = copy.deepcopy(model), fuse.compile(model)
    for module in (fused, expected):
        module(torch.ones(4, 8)).sum().backward()  # calls with such hooks are served, not recorded
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        for module in (fused, expected):
            module.zero_grad()
            checkpoint(module, x, use_reentrant=False).square().sum().backward()
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert fused.last_run is not None
    assert fused.last_run.kernels > 0
    steps = model[1].num_batches_tracked.clone()

    def refuse(_: Tensor) -> Any:
        raise KeyError("no room")

    with pytest.raises(KeyError, match="no room"), torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        fused(x)
    assert model[1].num_batches_tracked == steps + 1
