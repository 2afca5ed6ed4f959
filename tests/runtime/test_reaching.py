"""Sizes beyond those that were captured: one capture further out serves all that lie between."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.graph.capture import capture_short
from fuse.runtime import known_variants, making
from fuse.runtime.generalising import generalised, kinds_of_calls
from fuse.runtime.generalising.generalised import Generalised
from fuse.runtime.size_uses.size_reads import size_conditions
from fuse.runtime.sizes import other_sides, patience, reaching
from fuse.runtime.sizes.patience import Patience
from fuse.runtime.sizes.reaching import DISTANCE
from tests.fuzz.sizes import WIDTH, Model, attention, branch, train
from tests.runtime.test_generalised import infer, loop, plain

FIRST = ((27, 3), (24, 5), (29, 4), (28, 6))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of each capture that is made; every new size gets its program at its first call."""
    made: list[tuple[int, ...]] = []
    own, joint = making.capture_short, making.capture_joint

    def capture(model: nn.Module, args: tuple[Tensor, ...], *more: object) -> object:
        made.append(tuple(args[0].shape))
        return own(model, args, *more)  # type: ignore[arg-type]

    def capture_joint(model: nn.Module, args: tuple[Tensor, ...], *more: object, **named: object) -> object:
        made.append(tuple(args[0].shape))
        return joint(model, args, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(making, "capture_short", capture)
    monkeypatch.setattr(making, "capture_joint", capture_joint)
    for several in ("SETTLED", "SETTLED_UNLIKE"):
        monkeypatch.setattr(patience, several, 1_000_000)
    monkeypatch.setattr(patience, "AT_ONCE", 1_000_000)
    return made


@pytest.mark.sampled
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("function", [plain, loop, attention])
def test_one_capture_further_out_serves_what_lies_between(
    function: Callable[..., Tensor], training: bool, captures: list[tuple[int, ...]]
) -> None:
    model = Model(function).train(training)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    further = ((30, 3), (31, 4), (40, 3), (45, 3), (22, 5), (20, 4), (16, 5), (15, 6), (7, 5))
    for shape in (*FIRST, *further):
        (train if training else infer)(model, double, fused, torch.randn(*shape, WIDTH))
        assert not fused.last_run.fallbacks
    made = [shape[0] for shape in captures[len(FIRST) :]]
    assert len(made) <= 3
    assert max(made) >= 30 + DISTANCE
    assert min(made) <= 5


@pytest.mark.parametrize("lengths", [(300, 240, 270, 297, 251, 33), (320, 256, 288, 299, 60)])
def test_a_long_loop_is_captured_and_followed_at_few_steps(
    lengths: tuple[int, ...], captures: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step takes a millisecond: calls between the first two lengths need none of theirs."""
    followed: list[int] = []

    def follow(model: nn.Module, args: tuple[Tensor, ...], *more: object) -> object:
        followed.append(args[0].shape[0])
        return size_conditions(model, args, *more)  # type: ignore[arg-type]

    for module in (generalised, other_sides):
        monkeypatch.setattr(module, "size_conditions", follow)
    model = Model(loop).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for length in lengths:
        infer(model, double, fused, torch.randn(length, 3, WIDTH))
        assert not fused.last_run.fallbacks
    made_up = [shape[0] for shape in captures if shape[0] not in lengths]
    assert len(captures) - len(made_up) == 2
    assert followed
    assert max(made_up + followed) <= 200


class Cache(nn.Module):
    """Attention of one position to a cache, which grows by ``cat``."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.all, self.fused = nn.Linear(16, 48), fused

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.all(x).view(1, 1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        if self.fused:
            return F.scaled_dot_product_attention(q, keys, values), keys, values
        return torch.softmax(q @ keys.mT / 8**0.5, -1) @ values, keys, values


@pytest.mark.sampled
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("length", [0, 1, 3, 20])
def test_a_cache_that_grows_is_captured_at_few_lengths(
    fused: bool, length: int, captures: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At two lengths, and further out; from two lengths it is seen how the layouts of arguments vary."""
    monkeypatch.undo()
    monkeypatch.setattr(making, "capture_short", lambda *args: captures.append(()) or capture_short(*args))
    model = Cache(fused).eval()
    compiled = fuse.compile(model)
    keys, values = torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    served = 0
    with torch.no_grad():
        for _ in range(16):
            x = torch.randn(1, 1, 16)
            found, expected = compiled(x, keys, values), model(x, keys, values)
            torch.testing.assert_close(found, expected)
            _, keys, values = expected
            served += not compiled.last_run.fallbacks
    assert len(captures) <= 4  # a length that is another number of the model is captured, too
    assert served >= 6


@pytest.mark.parametrize("training", [False, True])
def test_another_way_further_out_is_not_taken(training: bool, captures: list[tuple[int, ...]]) -> None:
    """A branch on the length above 12."""
    model = Model(branch).train(training)
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in [(8, 2), (3, 3), (9, 4), (6, 5), (11, 3), (12, 4), (13, 2), (14, 3), (10, 2)]:
        (train if training else infer)(model, double, fused, torch.randn(*shape, WIDTH))


class Positions(nn.Module):
    """A table of positions, which has no more than 40."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Parameter(torch.randn(40, 1, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x + self.table[: x.shape[0]]).tanh()


@pytest.mark.filterwarnings("ignore:Positions runs eager")
def test_sizes_that_the_model_cannot_have_are_no_error(captures: list[tuple[int, ...]]) -> None:
    model = Positions().eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in (*FIRST, (33, 3), (36, 2), (39, 3), (40, 2), (26, 3)):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
        assert not fused.last_run.fallbacks
    with pytest.raises(RuntimeError):
        fused(torch.randn(41, 2, WIDTH))


def test_eager_seconds_of_sizes_that_teach_are_counted_together() -> None:
    """Each program that later ones are made from is worth the eager calls since the one before."""
    known = Patience()
    for size in range(patience.SETTLED):
        known.captured("kind", size, 1.0)
    known.captured("kind", 100, 0.25, resized=True)
    for _ in range(2):
        for size in range(200, 203):
            assert known.expected("kind", size, resized=True, together=True) == 0.25
            known.ran_eager("kind", size, 0.0625, together=True, resized=True)
        assert known.expected("kind", 203, resized=True, together=True) is None
        assert known.expected("kind", 203, together=True) == 1.0
        known.captured("kind", 203, 0.25, resized=True)


def test_eager_seconds_beyond_all_sizes_are_counted_together() -> None:
    patient = Patience()
    for size in range(patience.SETTLED):
        patient.captured("kind", size, 1.0)
    for _ in range(8):
        patient.ran_eager("kind", 100, 0.1, together=True)
    assert patient.expected("kind", 100, together=True) == 1.0
    patient.ran_eager("kind", 100, 0.2, together=True)
    assert patient.expected("kind", 100, together=True) is None
    assert patient.expected("kind", 100) == 1.0
    patient.captured("kind", 100, 1.0, resized=True)
    assert patient.expected("kind", 101, together=True) is None
    patient.captured("kind", 101, 1.0)
    assert patient.expected("kind", 102, together=True) == 1.0


def test_the_garbage_collector_pauses_while_a_graph_for_all_sizes_is_made(
    captures: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it traverses the new graphs in one of the next calls, which are short."""
    running: list[bool] = []
    for owner, name in ((known_variants, "learn"), (Generalised, "follow"), (reaching, "made_up")):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, own=own: running.append(gc.isenabled()) or own(*given))
    model = Model(plain).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in (*FIRST, (26, 4), (33, 3)):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
    assert len(running) >= 4
    assert not any(running)
    assert gc.isenabled()


def test_graphs_of_samples_are_gone_after_the_call(
    captures: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They refer to themselves; among the old objects, they would stay for long."""
    graphs: list[weakref.ref[object]] = []
    own = kinds_of_calls.schedule
    monkeypatch.setattr(kinds_of_calls, "schedule", lambda graph: graphs.append(weakref.ref(graph)) or own(graph))
    model = Model(plain).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    for shape in (*FIRST, (26, 4)):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
    assert graphs
    assert not any(graph() for graph in graphs)


def test_sizes_that_got_the_program_of_others_are_among_the_first_ones(
    captures: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After them, a size beyond all captured ones runs eager: it may be a rare one, and its capture takes long."""
    monkeypatch.setattr(patience, "SETTLED", 8)
    model = Model(plain).eval()
    double, fused = copy.deepcopy(model).double(), fuse.compile(model)
    between = [(length, batch) for length in (25, 26, 27, 28) for batch in (4, 5, 6)]
    for shape in (*FIRST, *between):
        infer(model, double, fused, torch.randn(*shape, WIDTH))
    before = len(captures)
    infer(model, double, fused, torch.randn(400, 5, WIDTH))
    assert [fallback.reason[:19] for fallback in fused.last_run.fallbacks] == ["sizes keep changing"]
    assert len(captures) == before
