"""A team of threads of which some come late, or do not come at all for a while."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.kernel.cpu.prelude import text_of_headers
from fuse.runtime.cpu import compiler

SUMS = """
// Adds up 64 numbers `steps` times, each step from what the step before left: as loop kernels do. Member `late` comes
// `pause` microseconds late in every step from `first` on. Returns what it comes to; who[i] are members in step i.
struct Sums { int64_t steps, late, first, pause; double *memory; int64_t *who; };
static int share(char *const *args, fuse_team *team, int64_t member) {
    const Sums &of = *(const Sums *)args[0];
    int64_t first = 64 * member / team->members, last_place = 64 * (member + 1) / team->members;
    if (!team->wait(member)) return 0;
    if (team->members == 1) last_place = 64;
    for (int64_t t = 0; t < of.steps; ++t) {
        const double *read = of.memory + (t & 1) * 64;
        double *write = of.memory + (~t & 1) * 64;
        if (member == of.late && t >= of.first) usleep(of.pause);
        for (int64_t i = first; i < last_place; ++i) write[i] = 0.5 * read[i] + 0.25 * read[(i + 1) % 64] + i;
        if (member == 0) of.who[t] = team->members;
        if (!team->wait(member)) return 0;
        if (team->members == 1) last_place = 64;
    }
    return 0;
}
extern "C" int sums(int64_t wanted, int64_t steps, int64_t late, int64_t first, int64_t pause, double *memory,
                    int64_t *who) {
    Sums of = {steps, late, first, pause, memory, who};
    char *args[] = {(char *)&of};
    return fuse_run_team(share, args, wanted);
}
"""


@pytest.fixture(scope="module")
def sums() -> Callable[..., tuple[Tensor, list[int]]]:
    library = compiler.build("#include <unistd.h>\n" + text_of_headers(("threads.h",)) + SUMS)
    library.sums.argtypes = [ctypes.c_int64] * 5 + [ctypes.c_void_p] * 2

    def run(wanted: int, steps: int, late: int = -1, first: int = 0, pause: int = 0) -> tuple[Tensor, list[int]]:
        memory, who = torch.ones(128, dtype=torch.float64), torch.zeros(steps, dtype=torch.int64)
        assert library.sums(wanted, steps, late, first, pause, memory.data_ptr(), who.data_ptr()) == 0
        return memory, who.tolist()

    return run


@pytest.fixture
def threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("wanted", [2, 3, 8])
def test_steps_wait_for_each_other_with_more_threads_than_processors(
    wanted: int, sums: Callable[..., tuple[Tensor, list[int]]]
) -> None:
    expected, _ = sums(1, 400)
    for _ in range(5):
        assert torch.equal(sums(wanted, 400)[0], expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_member_that_is_late_is_not_waited_for_again_and_again(
    late: int, sums: Callable[..., tuple[Tensor, list[int]]]
) -> None:
    expected, _ = sums(1, 200)
    found, members = sums(3, 200, late, 0, 3000)
    assert torch.equal(found, expected)
    assert members[0] == 3
    assert members[-1] == 1
    assert members.index(1) < 50


@pytest.mark.usefixtures("threads")
def test_teams_of_several_callers_do_not_meet(sums: Callable[..., tuple[Tensor, list[int]]]) -> None:
    expected, _ = sums(1, 300)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda late: sums(3, 300, late % 4, 100, 100)[0], range(24)))
    assert all(torch.equal(one, expected) for one in found)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(96, 96)

    def forward(self, xs: Tensor, ys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.zeros(6, 96)
        for x in xs:
            h = torch.tanh(x + self.cell(h))
        return h, (ys * ys).sum(), torch.softmax(ys.view(500, -1) @ self.cell.weight[:40], -1)


def test_bits_do_not_depend_on_threads_nor_on_who_calls_at_the_same_time() -> None:
    model, xs, ys = Recurrent(), torch.randn(40, 6, 96), torch.randn(500 * 40)
    fused, before = fuse.compile(model), torch.get_num_threads()
    expected = fused(xs, ys)
    failures: list[int] = []

    def call(number: int) -> None:
        torch.set_num_threads(number)
        for _ in range(20):
            with torch.no_grad():
                if not all(map(torch.equal, fused(xs, ys), expected)):
                    failures.append(number)

    try:
        callers = [threading.Thread(target=call, args=(number,)) for number in (1, 2, 3, 8)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
        assert not failures
        assert not any(caller.is_alive() for caller in callers)
    finally:
        torch.set_num_threads(before)
