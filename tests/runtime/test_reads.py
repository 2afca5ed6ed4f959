"""Models that read values: right whether the values stay, alternate or never repeat, and fused where that can be."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

import fuse
from benchmarks.reading_models import KINDS, PATTERNS, WIDTH, Block
from fuse.runtime import engine, known_variants
from fuse.runtime.variants.specialised import LARGEST_FAMILY, LARGEST_UNUSED, PATIENCE, Family
from tests.samples import newer_torch, outcome

CALLS = 7


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def held(model: nn.Module, calls: list[tuple[Any, ...]]) -> list[Any]:
    """Assert that each call does what eager's does; returns the records of what was launched."""
    eager, fused = copy.deepcopy(model), fuse.compile(model)
    runs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for args in calls:
            expected = outcome(eager, copy.deepcopy(args))
            torch.testing.assert_close(outcome(fused, copy.deepcopy(args)), expected)
            runs.append(fused.last_run)
    return runs


@pytest.mark.sampled
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=newer_torch) if name == "chosen" else name for name in KINDS]
)
def test_every_kind_is_right_and_fused_where_values_come_back(name: str, pattern: str) -> None:
    kind = KINDS[name]
    model, x = Block(kind.read, depth=1).eval(), torch.randn(6, WIDTH)
    with torch.no_grad():
        runs = held(model, [(x, kind.values(PATTERNS[pattern](number))) for number in range(CALLS)])
    if pattern != "never repeat" or kind.fuses:
        assert all(run.fallbacks == () for run in runs)
        assert runs[-1].launches <= 6
    assert runs[0].reads


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["check", "branch", "scaled", "sliced", "late"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_training_reads_as_eager_does(name: str, pattern: str) -> None:
    kind = KINDS[name]
    model = Block(kind.read, depth=1)
    eager = copy.deepcopy(model)
    fused, x = fuse.compile(model), torch.randn(6, WIDTH)
    for number in range(4):
        told = kind.values(PATTERNS[pattern](number))
        for one in (eager, fused):
            one(x, told).square().sum().backward()
        assert fused.last_run.fallbacks == ()
        assert fused.last_run.backward is not None
        for (label, expected), found in zip(eager.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4, msg=label)


# ---- a call that is missed leaves nothing behind ---------------------------------------------------------------------


class Remembers(nn.Module):
    """Writes a buffer, an attribute and an argument, and draws, before it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.norm = nn.BatchNorm1d(4)
        self.seen = 0

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        self.total += x.sum(0)
        self.seen += 1
        x.mul_(1.5)
        y = nn.functional.dropout(self.norm(x), 0.4, training=True)
        if (told * self.total.sum()).sum() > 0:
            return y * 2
        x.add_(1)
        return nn.functional.dropout(y, 0.2, training=True)


def test_a_miss_changes_no_buffer_argument_attribute_or_random_number() -> None:
    model = Remembers()
    signs = [1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0]
    with torch.no_grad():
        runs = held(model, [(torch.rand(8, 4), torch.tensor([sign])) for sign in signs])
    assert all(run.fallbacks == () for run in runs)
    assert model.seen == len(signs)


class OutOfRange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, places: Tensor) -> Tensor:
        self.calls += 1
        return self.table[places] * 2 if places.max() < 4 else self.table.sum() + self.calls


def test_what_a_program_raises_before_it_is_confirmed_is_a_miss() -> None:
    with torch.no_grad():
        calls = [(torch.tensor([0, 3]),), (torch.tensor([1, 9]),), (torch.tensor([2, 2]),), (torch.tensor([0, 7]),)]
        runs = held(OutOfRange(), calls)
    assert [run.fallbacks for run in runs] == [()] * 4


def test_a_check_that_fails_raises_eagers_error_and_the_next_call_is_fused() -> None:
    model = Block(KINDS["check"].read, depth=1).eval()
    fused, x = fuse.compile(model), torch.randn(3, WIDTH)
    with torch.no_grad():
        for told in (torch.zeros(4), torch.arange(4.0), torch.zeros(4), torch.arange(4.0)):
            if told.any():
                torch.testing.assert_close(fused(x, told), model(x, told))
                assert fused.last_run.fallbacks == ()
            else:
                with pytest.raises(AssertionError, match="times must increase"):
                    fused(x, told)


# ---- values that never repeat ----------------------------------------------------------------------------------------


def test_values_that_never_repeat_end_in_eager_with_one_message_that_names_the_line() -> None:
    fused = fuse.compile(Calls(lambda x, n: x * len(f"{n.sum()}") * float(n.sum())))
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(3 * LARGEST_FAMILY):
            n = torch.tensor([1.5 * number])
            torch.testing.assert_close(fused(torch.ones(3), n), torch.ones(3) * len(f"{n.sum()}") * float(n.sum()))
    assert [str(w.message) for w in told if "test_reads.py" in str(w.message)] == [str(told[-1].message)]
    assert "differs from call to call" in fused.last_run.fallbacks[0].reason


def test_a_family_that_has_ended_runs_no_program_and_is_captured_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made = MagicMock(side_effect=known_variants.make)
    served = MagicMock(side_effect=engine.Engine._served, autospec=True)
    monkeypatch.setattr(known_variants, "make", made)
    monkeypatch.setattr(engine.Engine, "_served", lambda *given: served(*given))
    function = lambda x, n: x * int(f"{n.item()}")  # noqa: E731
    fused, x = fuse.compile(Calls(function)), torch.randn(3)

    def called(x: Tensor, number: int) -> tuple[int, int, tuple[str, ...]]:
        """How many captures there were so far, how many programs ran, and why the call ran eager."""
        torch.testing.assert_close(fused(x, torch.tensor(number)), function(x, torch.tensor(number)))
        return made.call_count, served.call_count, tuple(one.reason for one in fused.last_run.fallbacks)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured = [called(x, number) for number in range(LARGEST_UNUSED)]
        assert [made for made, _, reason in captured if not reason] == [1, 2, 3, 4]
        in_vain = [called(x, number) for number in range(LARGEST_UNUSED, 2 * LARGEST_UNUSED)]
        (reason,) = in_vain[0][2]
        assert "test_reads.py" in reason
        assert "differs from call to call" in reason
        programs = [programs for _, programs, _ in in_vain]
        assert [after - before for before, after in itertools.pairwise(programs)] == [1, 1, 1]  # it tells of the others
        # It has ended. Even a value that has a program runs eager: what each call reads is compared with nothing.
        ended = [called(x, number) for number in (99, 0, LARGEST_UNUSED - 1, 99)]
        assert ended == [(LARGEST_UNUSED, programs[-1], (reason,))] * 4
        # Calls of another kind are another family.
        assert [called(x.double(), number)[2] for number in (0, 0, 1, 0)] == [()] * 4


@pytest.mark.parametrize("served", [0, 1, 5, 3 * PATIENCE])
def test_a_family_ends_when_it_misses_more_calls_than_it_serves(served: int) -> None:
    family: Family[str] = Family()
    for _ in range(served):
        family.served("one")
    before = LARGEST_UNUSED if not served else PATIENCE + min(served, PATIENCE)
    for _ in range(before - 1):
        family.in_vain("model", None)
        assert family.reason is None
    family.in_vain("model", None)
    assert family.reason is not None


def test_a_family_that_serves_every_second_call_does_not_end() -> None:
    family: Family[str] = Family()
    for _ in range(10 * PATIENCE):
        family.served("one")
        family.in_vain("model", None)
    assert family.reason is None


def test_a_family_whose_member_served_for_long_learns_that_another_follows_and_that_none_serves() -> None:
    family: Family[str] = Family()
    for _ in range(3 * PATIENCE):
        family.served("a")
    assert family.likely() == "a"
    for one in "abab":
        family.served(one)
    assert family.likely() == "a"
    for _ in range(3 * PATIENCE):
        family.served("b")
    assert family.likely() == "b"
    for _ in range(2 * PATIENCE - 1):
        family.in_vain("model", None)
    family.served("b")
    family.in_vain("model", None)
    assert family.reason is None
    family.in_vain("model", None)
    assert family.reason is not None


def test_a_number_that_goes_back_to_tensors_is_no_guard() -> None:
    fused = fuse.compile(Calls(lambda x: (x / x.abs().max().item(), 2 * x.sum().item() + 1)))
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5)
            scaled, number = fused(x)
            assert type(number) is float
            torch.testing.assert_close(scaled, x / x.abs().max())
            torch.testing.assert_close(number, 2 * x.sum().item() + 1)
    assert [(line.guard, line.count) for line in fused.last_run.reads] == [("none", 2)]
    assert fused.last_run.launches == 1


def test_alternating_values_are_foreseen() -> None:
    """The specialisation that followed last time is tried first: no call runs a program in vain."""
    model = Block(KINDS["late"].read, depth=1).eval()
    fused, x = fuse.compile(model), torch.randn(6, WIDTH)
    with torch.no_grad():
        for number in range(6):
            fused(x, KINDS["late"].values(number))
        tried = []
        programs = {one.program for state in fused._own()._known.states for one in state.variants}
        for program in programs:
            confirm = program.confirm
            program.confirm = lambda values, confirm=confirm: (tried.append(1), confirm(values))[1]
        for number in range(6):
            fused(x, KINDS["late"].values(number))
    assert (len(programs), len(tried)) == (2, 6)


def test_branches_may_have_weights_of_their_own() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.experts[int(x.sum() > 0)](x)) * 2

    x = torch.ones(3, WIDTH)
    runs = held(Experts().eval(), [(x,), (-x,), (x,), (-x,), (-x,), (x,)])
    assert [run.fallbacks for run in runs] == [()] * 6


def test_torch_compile_hands_reads_over() -> None:
    model = Block(KINDS["branch"].read, depth=1).eval()
    compiled = torch.compile(model, backend="fuse")
    x = torch.randn(4, WIDTH)
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        for number in range(3):
            told = KINDS["branch"].values(number)
            torch.testing.assert_close(compiled(x, told), model(x, told))
        scaled = torch.compile(Calls(lambda x: x / x.abs().max().item()), backend="fuse")
        torch.testing.assert_close(scaled(x), x / x.abs().max())


def test_inference_mode_and_threads() -> None:
    import threading

    model = Block(KINDS["branch"].read, depth=1).eval()
    fused, x = fuse.compile(model), torch.randn(4, WIDTH)
    wrong: list[int] = []

    def run(first: int) -> None:
        with torch.inference_mode():
            for number in range(first, first + 20):
                told = KINDS["branch"].values(number * number // 3)
                if not torch.allclose(fused(x, told), model(x, told), atol=1e-5):
                    wrong.append(number)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    with warnings.catch_warnings(record=True) as said:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert not said  # no call ran eager because another thread made the program for its value first


class WritesSometimes(nn.Module):
    """A buffer that only calls with a set flag write."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        if flag.all():
            self.count += 1
        return x * self.count


def test_a_buffer_that_some_calls_write_is_not_frozen_in_others() -> None:
    model, x = WritesSometimes(), torch.ones(3)
    fused = fuse.compile(model, freeze=True)
    with torch.no_grad():
        for flag, count in ((False, 0), (True, 1), (False, 1), (True, 2), (False, 2)):
            assert fused(x, torch.tensor([flag])).tolist() == [count] * 3
            assert not fused.last_run.fallbacks


def test_frozen_weights_and_reads() -> None:
    model = Block(KINDS["nested"].read, depth=1).eval()
    fused, x = fuse.compile(model, freeze=True), torch.randn(4, WIDTH)
    with torch.no_grad():
        for number in range(4):
            told = KINDS["nested"].values(number)
            torch.testing.assert_close(fused(x, told), model(x, told), rtol=1e-4, atol=1e-5)
    assert fused.last_run.fallbacks == ()


def test_without_a_compiler_reads_are_confirmed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuse.errors import CompilerMissing
    from fuse.runtime import making

    def missing(graph: Any) -> Any:
        raise CompilerMissing("no compiler here")

    monkeypatch.setattr(making, "program_of", missing)
    signs = [1.0, -1.0, 1.0, 1.0, -1.0]
    with torch.no_grad():
        held(Remembers(), [(torch.rand(8, 4), torch.tensor([sign])) for sign in signs])


def test_values_without_order_are_served_by_the_specialisation_of_each() -> None:
    def function(y: Tensor, told: Tensor) -> Tensor:
        return y * 2 if told.sum() > 0 else y - 1

    model = Block(function, depth=4).eval()
    fused, x = fuse.compile(model), torch.randn(64, WIDTH)
    with torch.no_grad():
        for number in torch.randint(0, 2, (40,), generator=torch.Generator().manual_seed(5)).tolist():
            torch.testing.assert_close(fused(x, _sign(number)), model(x, _sign(number)), rtol=1e-4, atol=1e-5)
            assert fused.last_run.fallbacks == ()
    assert sum(len(state.variants) for state in fused._own()._known.states) == 2


def _sign(number: int) -> Tensor:
    return torch.full((8,), 1.0 - 2.0 * number)
