"""Programs for further sizes, made from those for some: the same steps as from a resized graph, at every size."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.kernel.sizes.sized import lowering_of
from fuse.runtime import known_variants
from fuse.runtime.autograd.training import RewrittenGraphs, Training
from fuse.runtime.generalising import kinds_of_calls
from fuse.runtime.generalising.kinds_of_calls import Between
from fuse.runtime.programs.schedule import schedule
from fuse.runtime.programs.wiring import wiring_of
from fuse.runtime.resizing import resized, sized_programs
from fuse.runtime.resizing.fitting import Samples
from fuse.runtime.resizing.schedule_numbers import SizedPart, outline_and_numbers
from fuse.runtime.resizing.sized_programs import MOST_SAMPLES, SizedProgram
from fuse.runtime.sizes import patience
from tests.fuzz.sizes import WIDTH, Model, attention, windows
from tests.runtime.test_generalised import by_mode, count_too, loop, plain, positions


@pytest.fixture(autouse=True)
def _made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new size gets its program at its first call."""
    monkeypatch.setattr(patience.Patience, "expected", lambda *_, **__: None)
    monkeypatch.setattr(patience, "AT_ONCE", 1_000_000)


Made = SizedProgram | Training


@pytest.fixture(name="programs")
def _programs(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """The programs that are made without a graph; each has the numbers of the resized graph's program, if that has the
    same steps: a product may be a kernel at some sizes, and a library call at others."""
    found: list[Made] = []
    own = Between.program

    def program(between: Between) -> Made | None:
        made = own(between)
        if made is not None:
            found.append(made)
            graph = between.captured().graphs[0]  # type: ignore[union-attr]  # a call between captured ones
            outline, numbers = outline_and_numbers([SizedPart(schedule(graph), graph.meta["signature"])])
            own_outline, own_numbers = outline_and_numbers([SizedPart(made.program.schedule, made.signature)])
            assert own_outline != outline or own_numbers == numbers
            sized = made.sized if isinstance(made, Training) else None
            for one in (sized.forward, sized.backward) if sized else (made,):
                assert wiring_of(one.program.schedule) == one.program.wiring
        return made

    monkeypatch.setattr(Between, "program", program)
    return found


def residual(m: Model, x: Tensor) -> Tensor:
    return F.layer_norm(x + m.first(F.gelu(m.first(x))), (WIDTH,))


def several(m: Model, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = m.first(x)
    return y, y[1:], torch.cat([y, x], -1).relu()


def with_library(m: Model, x: Tensor) -> Tensor:
    """Operators that are called from Python, between kernels."""
    return torch.sort(m.first(x).tanh(), 0).values.cumsum(0) * 2


def in_steps(m: Model, x: Tensor) -> Tensor:
    """A loop of which each step calls an operator from Python."""
    h = x.new_zeros(x.shape[1:])
    for step in x:
        h = torch.sort(torch.tanh(m.first(step) + h), -1).values
    return h


def of_length(m: Model, x: Tensor) -> Tensor:
    return m.first(x).softmax(0) * x.shape[0]


def padded(m: Model, x: Tensor) -> Tensor:
    """A polynomial of four terms: the result has ``(length + 1) * (batch + 1)`` rows."""
    return F.pad(m.first(x), (0, 0, 0, 1, 0, 1)).cumsum(0) * 2


ALL = (plain, loop, residual, several, padded, with_library, in_steps, attention, positions, count_too, by_mode)


def run(function: Callable[[Model, Tensor], object], sizes: list[tuple[int, int]]) -> nn.Module:
    torch.manual_seed(0)
    model = Model(function).eval()
    fused = fuse.compile(model)
    with torch.no_grad():
        for length, batch in sizes:
            x = torch.randn(length, batch, WIDTH)
            expected = model(x)
            torch.testing.assert_close(fused(x), expected, rtol=1e-4, atol=1e-5)
    return fused


def at_random(count: int, seed: int = 0, longest: int = 40) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    pairs = [(draw.randint(4, longest), draw.randint(2, 9)) for _ in range(count)]
    return list(dict.fromkeys(pairs))


@pytest.mark.sampled
@pytest.mark.parametrize("function", ALL, ids=lambda one: one.__name__)
def test_programs_have_the_steps_of_resized_graphs(
    function: Callable[[Model, Tensor], object], programs: list[Made]
) -> None:
    run(function, at_random(70))
    assert len(programs) >= 8


@pytest.mark.sampled
@pytest.mark.parametrize("function", [plain, loop, residual, several, attention], ids=lambda one: one.__name__)
def test_training(function: Callable[[Model, Tensor], object], programs: list[Made]) -> None:
    """Results and gradients at further sizes, also for a loss of some results, and gradients of gradients."""
    torch.manual_seed(0)
    model, other = Model(function), Model(function)
    other.load_state_dict(model.state_dict())
    fused = fuse.compile(model)
    for number, (length, batch) in enumerate(at_random(70, longest=30)):
        x = torch.randn(length, batch, WIDTH, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        result, expected = fused(x), other(y)
        results = (result, expected) if isinstance(result, Tensor) else (result[number % 3], expected[number % 3])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        losses = [one.square().sum() for one in results]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(model.first.weight.grad, other.first.weight.grad, rtol=1e-3, atol=1e-3)
        model.zero_grad()
        other.zero_grad()
    assert len(programs) >= 3
    if not isinstance(result, Tensor):
        return
    x = torch.randn(17, 5, WIDTH, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    for m, z in ((fused, x), (other, y)):
        (gradient,) = torch.autograd.grad(m(z).square().sum(), z, create_graph=True)
        gradient.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 2)], ids=str)
def test_a_loss_of_some_results(used: tuple[int, ...], programs: list[Made], monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for a loss of some results are made without graphs; one for another loss is made from a graph."""
    torch.manual_seed(0)
    model, other = Model(several), Model(several)
    other.load_state_dict(model.state_dict())
    fused, rewritten = fuse.compile(model), []
    own = Training._rewritten_backward

    def made(training: Training, missing: frozenset[int]) -> RewrittenGraphs:
        rewritten.append((missing, training.sized is not None))
        return own(training, missing)

    monkeypatch.setattr(Training, "_rewritten_backward", made)

    def step(length: int, batch: int, used: tuple[int, ...]) -> None:
        x = torch.randn(length, batch, WIDTH, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        for of, given in ((fused, x), (other, y)):
            results = of(given)
            sum(results[i].square().sum() for i in used).backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(model.first.weight.grad, other.first.weight.grad, rtol=1e-3, atol=1e-3)
        model.zero_grad()
        other.zero_grad()

    for length, batch in at_random(60, longest=30):
        step(length, batch, used)
    assert len(programs) >= 8
    missing = frozenset(range(3)).difference(used)
    assert rewritten[0] == (frozenset(), False)
    assert len(rewritten) > 1
    assert set(rewritten[1:]) == {(missing, False)}
    step(17, 5, (0, 1, 2))
    assert rewritten[-1][0] == frozenset()


def test_no_graph_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Model(residual).eval()
    fused = fuse.compile(model)
    sizes = at_random(60)
    copied = []
    own = kinds_of_calls.resized
    with torch.no_grad():
        for number, (length, batch) in enumerate(sizes):
            fused(torch.randn(length, batch, WIDTH))
            if number == len(sizes) // 2:
                monkeypatch.setattr(kinds_of_calls, "resized", lambda *given: copied.append(0) or own(*given))
        assert len(copied) <= 4  # the graphs of calls beyond the samples
        x = torch.randn(23, 5, WIDTH)
        torch.testing.assert_close(fused(x), model(x))
        (alone := fuse.compile(model))(x)
    assert not fused.last_run.fallbacks
    assert fused.last_run.launches == alone.last_run.launches


def test_one_size_that_varies(programs: list[Made]) -> None:
    run(plain, [(length, 3) for length in (50, 4, 20, 33, 41, 8, 12, 29, 17, 38, 25, 9, 30)])
    assert programs


def test_sizes_one_after_another(programs: list[Made]) -> None:
    """Each size is beyond those before: captures and schedules further out serve those that follow."""
    run(residual, [(length, 3) for length in range(4, 44)])
    assert len(programs) >= 20


class FromSource(nn.Module):
    """Attention from one sequence to another."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.asked, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = F.gelu(self.given(source))
        return self.norm(target + (self.asked(target) @ memory.transpose(1, 2)).softmax(-1) @ memory)


def test_three_sizes_that_vary(programs: list[Made]) -> None:
    """A batch, the length of a source and that of a target."""
    torch.manual_seed(0)
    model = FromSource().eval()
    double, fused, draw = copy.deepcopy(model).double(), fuse.compile(model), random.Random(0)
    with torch.no_grad():
        for _ in range(60):
            batch, source, target = draw.randint(2, 9), draw.randint(5, 40), draw.randint(5, 40)
            x, y = torch.randn(batch, source, WIDTH), torch.randn(batch, target, WIDTH)
            torch.testing.assert_close(fused(x, y), double(x.double(), y.double()).float(), rtol=1e-4, atol=1e-5)
            assert not fused.last_run.fallbacks
    assert len(programs) >= 8


def test_sizes_in_whole_windows_and_halves() -> None:
    run(windows, at_random(60))
    run(lambda m, x: m.first(x[: x.shape[0] // 2]).relu(), at_random(60))


def test_numbers_that_are_no_polynomials_are_sought_once(programs: list[Made], monkeypatch: pytest.MonkeyPatch) -> None:
    sought = []
    monkeypatch.setattr(Samples, "polynomial_through", lambda *_: sought.append(0))
    run(plain, at_random(60))
    assert len(sought) == 1
    assert not programs


def test_a_number_that_is_a_polynomial_at_some_sizes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one sample has other numbers, there is no template any more."""
    fused = run(plain, at_random(60))
    (kind,) = (kind for kinds in fused._engine._known._kinds._by_state.values() for kind in kinds)
    (common,) = kind._common
    programs = common.programs
    template = next(iter(programs._templates.values()))
    sizes = (11, 7)
    numbers = template.evaluate(*sizes)
    assert template.extended(sized_programs._Sample(sizes, numbers)) is not None
    assert template.extended(sized_programs._Sample(sizes, (*numbers[:-1], numbers[-1] + 1))) is None
    assert programs.learnt < MOST_SAMPLES


def test_a_kernel_that_does_not_serve_a_size_has_the_graph_resized() -> None:
    fused = run(plain, at_random(60))
    (kind,) = (kind for kinds in fused._engine._known._kinds._by_state.values() for kind in kinds)
    (common,) = kind._common
    sizes = next((b, a) for a in range(12, 30) for b in range(4, 7) if common.covers((b, a)))  # the smaller one first
    assert common.programs.at(sizes) is not None
    template = next(iter(common.programs._templates.values()))
    served = [step.kernel.served for step in template.copy(*sizes)[0].plan.steps if hasattr(step, "kernel")]
    assert all(one is not None and one.at(one.sizes) is not None for one in served)
    with lowering_of(None):
        assert all(one is not None and one.at(tuple(-n for n in one.sizes)) is None for one in served)


def test_a_fault_of_fuse_has_the_graph_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(known_variants, "of_size", fault)
    fused = run(plain, at_random(60))
    assert not fused.last_run.fallbacks


def test_programs_of_about_one_size_share_a_workspace(programs: list[Made]) -> None:
    """Nothing is planned for the second one, and its first run touches no new memory; further apart, nothing is
    shared."""
    further = [(33, 7), (34, 7), (18, 7)]
    fused = run(residual, [*(pair for pair in at_random(70) if pair not in further), *further])
    of = {tuple(one.program.schedule.buffers[0].value.shape[:2]): one.program for one in programs}
    first, second, other = of[33, 7], of[34, 7], of[18, 7]
    assert first.wiring is second.wiring is other.wiring
    assert first.workspace_bytes == second.workspace_bytes > other.workspace_bytes
    assert first.wiring.memory(first.schedule) is second.wiring.memory(second.schedule)
    assert first.wiring.memory(first.schedule) is not other.wiring.memory(other.schedule)
    assert len(first.wiring.memory(first.schedule).pool) == 1
    assert not fused.last_run.fallbacks


def masked(m: Model, x: Tensor) -> Tensor:
    """Constants of several operators that are computed from sizes: a mask, positions, and weights of equal elements."""
    length = x.shape[0]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    places = torch.arange(length, dtype=torch.float32)[:, None] / 7
    scores = torch.einsum("ibd,jbd->bij", x, m.first(x)).masked_fill(later, -1e9).softmax(-1)
    return torch.einsum("bij,jbd->ibd", scores, x) + places[..., None].cos() + torch.full((length, 1, 1), 1 / 3)


def test_constants_of_further_sizes_have_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are eager's; once programs are known, no graph of a constant is copied."""
    copied: list[object] = []
    own = resized.value_of_origin
    monkeypatch.setattr(resized, "value_of_origin", lambda origin: copied.append(origin) or own(origin))
    torch.manual_seed(0)
    fused = fuse.compile(model := Model(masked).eval())
    with torch.no_grad():
        sized = 0
        for further, pairs in enumerate((at_random(70), at_random(20, seed=1, longest=20))):
            for length, batch in pairs:
                x = torch.randn(length, batch, WIDTH)
                torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
                sized += bool(further) and fused.compiled.is_sized()
            assert bool(copied) is not bool(further)
            copied.clear()
    assert sized >= 8
