"""Loops as one kernel, against their steps one by one in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fuse
from fuse.graph.capture import capture
from fuse.graph.loop import Loop, LoopSpec, StepInput
from fuse.kernel.cpu.loop_kernel import HEADERS
from fuse.kernel.cpu.prelude import prelude, text_of_headers
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.loops.lower_loops import lower_loop
from fuse.kernel.target import LoopKernels
from fuse.runtime.cpu import compiler
from fuse.testing import assert_fuses

StepFunction = Callable[..., "Tensor | tuple[Tensor, ...]"]


@dataclass(frozen=True)
class Example:
    """A loop and its operands; the first result is collected too."""

    step: StepFunction
    states: Sequence[Tensor]
    inputs: Sequence[Tensor] = ()
    invariants: Sequence[Tensor] = ()
    reads: Sequence[StepInput] = ()
    trip_count: int = 0

    @property
    def operands(self) -> list[Tensor]:
        return [*self.states, *self.inputs, *self.invariants]

    def to(self, dtype: torch.dtype) -> Example:
        states, inputs, invariants = (
            [t.to(dtype) for t in group] for group in (self.states, self.inputs, self.invariants)
        )
        return replace(self, states=states, inputs=inputs, invariants=invariants)

    def loop(self) -> Loop:
        step = self.step
        reads = tuple(self.reads) or tuple(StepInput(0, 0, 1) for _ in self.inputs)
        steps = self.trip_count or self.inputs[0].shape[0]

        class Body(nn.Module):
            def forward(self, *args: Tensor) -> Tensor | tuple[Tensor, ...]:
                return step(*args)

        parts = [x.select(r.dim, r.start) for x, r in zip(self.inputs, reads, strict=True)]
        body = capture(Body(), (*self.states, *parts, *self.invariants))
        output = body.graph.output_node()
        (results,) = output.args
        assert isinstance(results, tuple)
        output.args = ((*results, results[0]),)
        body.recompile()
        return Loop(body, LoopSpec(steps, len(self.states), reads, len(results) + 1 - len(self.states)))


def lower(example: Example) -> tuple[Loop, Kernel | Declined, list[Tensor]]:
    loop = example.loop()
    results = [torch.full_like(r, 7) for r in loop(*example.operands)]
    return loop, lower_loop(loop, example.operands, results), results


def lowered(example: Example) -> tuple[Loop, Kernel, list[Tensor]]:
    loop, kernel, results = lower(example)
    assert isinstance(kernel, Kernel), kernel
    return loop, kernel, results


def call(
    library: ctypes.CDLL,
    kernel: Kernel,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    workspace: Tensor | None = None,
) -> int:
    if workspace is None:  # NaN as float: nothing may rely on zeros
        workspace = torch.full((kernel.workspace_bytes,), 0xFF, dtype=torch.uint8)
    sizes = torch.tensor([value for _, value in kernel.sizes])
    pointers = [t.data_ptr() for t in (*operands, *results, workspace, sizes)]
    return int(getattr(library, kernel.name)((ctypes.c_void_p * len(pointers))(*pointers)))


def built(*kernels: Kernel) -> ctypes.CDLL:
    return compiler.build(prelude() + text_of_headers(HEADERS) + "\n".join(dict.fromkeys(k.source for k in kernels)))


def run(example: Example) -> list[Tensor]:
    _, kernel, results = lowered(example)
    assert call(built(kernel), kernel, example.operands, results) == 0
    return results


def assert_same_as_its_steps(*examples: Example) -> None:
    """All examples in one compiler call."""
    found = [lowered(example) for example in examples]
    library = built(*(kernel for _, kernel, _ in found))
    for example, (loop, kernel, results) in zip(examples, found, strict=True):
        assert call(library, kernel, example.operands, results) == 0
        exact = loop(*(o.double() if o.is_floating_point() else o for o in example.operands))
        eager = loop(*example.operands)
        for result, true, usual in zip(results, exact, eager, strict=True):
            error, usual_error = (result.double() - true).abs().max(), (usual.double() - true).abs().max()
            assert error <= 2 * usual_error + 1e-6


def weight(columns: int, depth: int) -> Tensor:
    return torch.randn(columns, depth) / depth**0.5


def lstm(h: Tensor, c: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x + functional.linear(h, w)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def lstm_with_layer_norm(h: Tensor, c: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = functional.layer_norm(x + h @ w, (w.shape[1],)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru(h: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    hr, hz, hn = functional.linear(h, w, b).chunk(3, 1)
    xr, xz, xn = x.chunk(3, 1)
    z = torch.sigmoid(xz + hz)
    return (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h


def gru_with_reset_outside(h: Tensor, x: Tensor, wr: Tensor, wz: Tensor, wn: Tensor) -> Tensor:
    xr, xz, xn = x.chunk(3, 1)
    r, z = torch.sigmoid(xr + h @ wr), torch.sigmoid(xz + h @ wz)
    return z * h + (1 - z) * torch.tanh(xn + (r * h) @ wn)


def light_gru(h: Tensor, x: Tensor, w: Tensor, drop: Tensor) -> Tensor:
    at, zt = (x + functional.linear(h * drop, w)).chunk(2, 1)
    z = torch.sigmoid(zt)
    return z * h + (1 - z) * torch.relu(at)


def elman(h: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x + functional.linear(h, w, b))


def two_layers(h: Tensor, k: Tensor, x: Tensor, w: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(x + h @ w)
    return h, torch.tanh(h @ u + k @ v)


def crf(alpha: Tensor, emission: Tensor, mask: Tensor, transitions: Tensor) -> Tensor:
    longer = torch.logsumexp(alpha.unsqueeze(2) + transitions + emission.unsqueeze(1), 1)
    return torch.where(mask.unsqueeze(1), longer, alpha)


def decay(s: Tensor, x: Tensor, gate: Tensor, a: Tensor) -> Tensor:
    return s * torch.sigmoid(a) + x * gate


def masked_lstm(h: Tensor, c: Tensor, x: Tensor, mask: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    new_h, new_c = lstm(h, c, x, w)
    keep = mask.unsqueeze(1)
    return torch.where(keep, new_h, h), torch.where(keep, new_c, c)


def example(cell: StepFunction, steps: int, rows: int, units: int) -> Example:
    def state() -> Tensor:
        return torch.randn(rows, units)

    def projected(gates: int) -> Tensor:
        return torch.randn(steps, rows, gates * units)

    mask = torch.rand(steps, rows) > 0.3
    u = units
    if cell is lstm:
        return Example(cell, [state(), state()], [projected(4)], [weight(4 * u, u)])
    if cell is lstm_with_layer_norm:
        return Example(cell, [state(), state()], [projected(4)], [weight(4 * u, u).t().contiguous()])
    if cell is gru:
        return Example(cell, [state()], [projected(3)], [weight(3 * u, u), torch.randn(3 * u)])
    if cell is gru_with_reset_outside:
        return Example(cell, [state()], [projected(3)], [weight(u, u) for _ in range(3)])
    if cell is light_gru:
        return Example(cell, [state()], [projected(2)], [weight(2 * u, u) / 4, (state() > 0).float()])
    if cell is elman:
        return Example(cell, [state()], [projected(1)], [weight(u, u), torch.randn(u)])
    if cell is two_layers:
        return Example(cell, [state(), state()], [projected(1)], [weight(u, u) for _ in range(3)])
    if cell is crf:
        return Example(cell, [state()], [projected(1), mask], [weight(u, u)])
    if cell is decay:
        return Example(cell, [state()], [projected(1), torch.randn(steps, rows, 1)], [torch.randn(u)])
    return Example(cell, [state(), state()], [projected(4), mask], [weight(4 * u, u)])


CELLS = [
    lstm,
    lstm_with_layer_norm,
    gru,
    gru_with_reset_outside,
    light_gru,
    elman,
    two_layers,
    crf,
    decay,
    masked_lstm,
]


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def threads() -> Iterator[None]:
    """What a test sets with ``torch.set_num_threads`` is undone."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
def test_a_loop_is_one_kernel_with_the_values_of_its_steps(cell: StepFunction) -> None:
    assert_same_as_its_steps(*(example(cell, *size) for size in ((1, 1, 5), (2, 3, 16), (17, 7, 100))))


def test_an_lstm_is_right_at_awkward_sizes() -> None:
    sizes = [(2, 17, 128), (3, 1, 1), (3, 3, 1), (2, 1, 128), (2, 13, 24)]
    assert_same_as_its_steps(*(example(lstm, *size) for size in sizes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_products_may_be_of_doubles_or_halves(dtype: torch.dtype) -> None:
    examples = [
        *(example(lstm, *size) for size in [(2, 17, 40), (3, 1, 1), (2, 13, 24)]),
        *(example(lstm_with_layer_norm, *size) for size in [(2, 9, 33), (2, 1, 16)]),
    ]
    assert_same_as_its_steps(*(e.to(dtype) for e in examples))


def test_inputs_may_be_read_backwards_and_along_any_dimension() -> None:
    steps, w = 9, weight(16, 16)
    backwards = [torch.randn(3, steps, 16)], [w, torch.randn(16)], [StepInput(1, steps - 1, -1)], steps
    every_other = [torch.randn(3, 16, 2 * steps)], [w, torch.randn(16)], [StepInput(2, 1, 2)], steps
    first = torch.randn(16, 3).t()
    assert_same_as_its_steps(Example(elman, [first], *backwards), Example(elman, [first], *every_other))


def test_states_may_have_any_rank_and_dtype() -> None:
    def best_so_far(best: Tensor, at: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        value, where = x.max(1)
        return torch.maximum(best, value), torch.where(value > best, where, at)

    def outer(s: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return s * 0.9 + k.unsqueeze(2) * v.unsqueeze(1)

    assert_same_as_its_steps(
        Example(best_so_far, [torch.randn(5), torch.zeros(5, dtype=torch.int64)], [torch.randn(7, 5, 11)]),
        Example(outer, [torch.randn(3, 4, 6)], [torch.randn(7, 3, 4), torch.randn(7, 3, 6)]),
        Example(lambda s, x: torch.tanh(s + x), [torch.randn(())], [torch.randn(7)]),
    )


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("cell", [lstm, gru_with_reset_outside, decay], ids=lambda cell: cell.__name__)
def test_any_number_of_threads_gives_the_same_bits(cell: StepFunction) -> None:
    loop = example(cell, 40, 6, 200)
    torch.set_num_threads(1)
    alone = run(loop)
    for count in (2, 5):  # more than this machine may have cores: those that wait must give way
        torch.set_num_threads(count)
        for result, expected in zip(run(loop), alone, strict=True):
            assert torch.equal(result, expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_may_fall_to_any_number_of_threads(count: int) -> None:
    torch.set_num_threads(count)
    assert_same_as_its_steps(example(lstm_with_layer_norm, 20, 7, 64), example(crf, 20, 7, 24))


def test_calls_at_the_same_time_do_not_disturb_one_another() -> None:
    loop = example(lstm, 30, 4, 64)
    _, kernel, expected = lowered(loop)
    library = built(kernel)
    call(library, kernel, loop.operands, expected)
    several = [[torch.empty_like(r) for r in expected] for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(lambda results: call(library, kernel, loop.operands, results), several))
    for results in several:
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize(
    ("cell", "shared_out", "waits"),
    [
        (lstm, "block", 2),
        (gru_with_reset_outside, "block", 3),
        (light_gru, "block", 3),
        (lstm_with_layer_norm, "row", 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_threads_wait_once_a_step_and_product_that_needs_it(cell: StepFunction, shared_out: str, waits: int) -> None:
    _, kernel, _ = lowered(example(cell, 4, 8, 128))
    assert f"first_{shared_out}" in kernel.source
    assert kernel.source.count("team->wait(") == waits  # one of them before the first step
    assert kernel.parallel


def grams(p: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(w @ p @ p.t() / 4 + x.t() @ x)


def attended(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(torch.softmax(h @ x.transpose(-1, -2), -1) @ x + h)


def grams_of(width: int, rows: int) -> Example:
    return Example(
        grams, [weight(width, width)], [weight(4 * rows, width).view(4, rows, width)], [weight(width, width)]
    )


def of_long_sums(h: Tensor, x: Tensor) -> Tensor:
    return h * 0.5 + (h.t() @ x.t()).sum() / 1000


def attended_of(*shape: int) -> Example:
    return Example(attended, [torch.randn(shape)], [torch.randn(4, *shape) / 4])


def test_products_of_what_changes_are_right_however_their_factors_lie() -> None:
    turned = grams_of(18, 20)
    turned = replace(turned, states=[turned.states[0].t()], inputs=[turned.inputs[0].transpose(1, 2).clone().mT])
    unlike = Example(attended, [torch.randn(17, 40)], [torch.randn(3, 21, 40) / 4])
    long = Example(of_long_sums, [torch.randn(200, 16)], [torch.randn(2, 17, 200)])
    narrow = [turned.to(torch.bfloat16), unlike.to(torch.float64)]
    assert_same_as_its_steps(turned, unlike, attended_of(2, 19, 20), long, *narrow)


@pytest.mark.parametrize(
    ("example", "turned"), [(grams_of(16, 16), 1), (grams_of(15, 16), 0), (attended_of(15, 64), 0)]
)
def test_a_factor_is_turned_over_where_results_would_be_sums_across_vectors(example: Example, turned: int) -> None:
    _, kernel, _ = lowered(example)
    assert kernel.source.count("_right = (float *)") == turned, kernel.source


def messages(h: Tensor, x: Tensor, places: Tensor) -> Tensor:
    return x.index_add(0, places, torch.tanh(h[places]))


def copies(h: Tensor, x: Tensor, places: Tensor) -> Tensor:
    return torch.tanh(x.index_add(0, places, h[places]))


@pytest.mark.parametrize(("cell", "stored"), [(messages, True), (copies, False)], ids=["costly", "cheap"])
def test_costly_values_that_are_added_at_computed_places_are_computed_once(cell: StepFunction, stored: bool) -> None:
    places = torch.tensor([4, 0, 4, 1, 2, 2, 3])
    example = Example(cell, [torch.randn(5, 8)], [torch.randn(6, 5, 8)], [places])
    _, kernel, _ = lowered(example)
    assert ("_written = (float *)" in kernel.source) is stored, kernel.source
    assert_same_as_its_steps(example)


def test_factors_of_long_sums_lie_along_them() -> None:
    _, kernel, _ = lowered(Example(of_long_sums, [torch.randn(200, 16)], [torch.randn(2, 17, 200)]))
    assert kernel.source.count("_left = (float *)") == 1
    assert "_right = (float *)" not in kernel.source
    assert kernel.source.count("fuse_across<8>(") == 2


def test_a_factor_is_computed_in_vectors_before_a_product_that_reads_its_elements_one_by_one() -> None:
    _, kernel, _ = lowered(attended_of(32, 32))
    lines = kernel.source.splitlines()
    exps = [number for number, line in enumerate(lines) if "fuse_exp(" in line]
    assert exps
    assert all("omp simd" in "".join(lines[number - 4 : number]) for number in exps)


@pytest.mark.parametrize(("width", "kernels"), [(64, True), (65, False)])
def test_large_products_of_what_changes_are_left_to_libraries(width: int, kernels: bool) -> None:
    _, found, _ = lower(grams_of(width, 16))
    assert isinstance(found, Kernel) == kernels
    assert kernels or "faster outside of the loop's kernel" in str(found)


def gates_put_together(d: Tensor, e: Tensor, x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shared = torch.tanh(d + x)
    gates = torch.cat([shared * y, torch.sigmoid(shared) * e, shared - e], 1)
    return gates @ w, e * shared, gates, gates * 2


def test_a_concatenation_is_computed_once_piece_by_piece_and_with_it_what_shares_its_work() -> None:
    states, inputs = [torch.randn(3, 20), torch.randn(3, 20)], [torch.randn(5, 3, 20), torch.randn(5, 3, 20)]
    put_together = Example(gates_put_together, states, inputs, [weight(60, 20)])
    _, kernel, _ = lowered(put_together)
    step = kernel.source[kernel.source.index("t < steps") :]
    assert (step.count("fuse_tanh("), step.count("fuse_sigmoid(")) == (1, 1)
    assert "inside" not in step
    assert step.index("_2_next[20") < step.index("fuse_product")
    assert_same_as_its_steps(put_together)


def halves_of_many(h: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    pieces = [torch.tanh(h * (i + 1) + x) for i in range(24)]
    return torch.cat(pieces, 1) @ w, torch.cat([h.exp(), pieces[0] @ w[:20]], 1)


def test_many_pieces_and_pieces_that_wait_for_a_product_are_right() -> None:
    assert_same_as_its_steps(
        Example(halves_of_many, [torch.randn(3, 20)], [torch.randn(4, 3, 20)], [weight(480, 20) / 60])
    )


def factors_of_one_norm(h: Tensor, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    norm = functional.layer_norm(h + x, (32,))
    return torch.tanh((norm.sin() @ v) * norm + (norm.exp() @ w).mean(1, keepdim=True))


def test_factors_of_products_are_computed_together_where_they_share_work() -> None:
    together = Example(
        factors_of_one_norm, [torch.randn(3, 32)], [torch.randn(4, 3, 32)], [weight(32, 32) / 6, weight(32, 32) / 6]
    )
    _, kernel, _ = lowered(together)
    before_products = kernel.source[kernel.source.index("t < steps") :].partition("fuse_product")[0]
    assert ("fuse_sin(" in before_products, "fuse_exp(" in before_products) == (True, True)
    assert before_products.count("fuse_sqrt(") == 1
    assert_same_as_its_steps(together)


def test_a_small_step_runs_on_one_thread() -> None:
    _, kernel, _ = lowered(example(lstm, 4, 1, 32))
    assert not kernel.parallel


def flipped(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h.flip(0) + x)


def normalised_over_rows(h: Tensor, x: Tensor) -> Tensor:
    h = torch.tanh(h + x)
    return (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt()


def moved_by_columns(h: Tensor, x: Tensor) -> Tensor:
    return torch.sigmoid(h) * x + h.roll(1, 0)


@pytest.mark.parametrize("step", [flipped, normalised_over_rows, moved_by_columns], ids=lambda step: step.__name__)
def test_rows_that_read_one_another_stay_on_one_thread(step: StepFunction) -> None:
    loop = Example(step, [torch.randn(64, 512)], [torch.randn(20, 64, 512)])
    _, kernel, _ = lowered(loop)
    assert not kernel.parallel
    assert_same_as_its_steps(loop)


def _softmax_over_rows(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(3 * h.softmax(0) + x)


def _mean_of_all(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h - h.mean() + x)


def _first_of_the_best_row(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(h - h.argmax(0) + x)


@pytest.mark.parametrize("cell", [_softmax_over_rows, _mean_of_all, _first_of_the_best_row], ids=lambda c: c.__name__)
def test_reductions_over_rows_stay_on_one_thread(cell: StepFunction) -> None:
    loop = Example(cell, [torch.randn(64, 128)], [torch.randn(20, 64, 128)])
    _, kernel, _ = lowered(loop)
    assert not kernel.parallel
    assert_same_as_its_steps(loop)


def test_a_batch_of_one_is_not_shared_out_by_what_it_reduces() -> None:
    def best(h: Tensor, w: Tensor) -> Tensor:
        return torch.max(h.unsqueeze(2) * w, 1).values.tanh()

    loop = Example(best, [torch.randn(1, 64)], [], [torch.randn(64, 64)], trip_count=50)
    _, kernel, _ = lowered(loop)
    assert not kernel.parallel
    assert_same_as_its_steps(loop)


def test_nothing_beside_a_weight_is_read() -> None:
    """Products are read a unit to the left and to the right, where they have no columns."""

    def shifted(h: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(functional.pad((h @ v)[:, 1:], (0, 1)) + functional.pad((h @ w)[:, :-1], (1, 0)))

    marked = torch.full((5, 20, 20), 1234.5)
    v, w = marked[1].copy_(weight(20, 20)), marked[3].copy_(weight(20, 20))
    loop = Example(shifted, [torch.randn(2, 20)], [], [v, w], trip_count=3)
    assert_same_as_its_steps(loop)
    _, kernel, results = lowered(loop)
    workspace = torch.zeros(kernel.workspace_bytes // 4)
    assert call(built(kernel), kernel, loop.operands, results, workspace) == 0
    assert (workspace == v[3, 3]).any()
    assert not (workspace == 1234.5).any()


def follow(h: Tensor, token: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """A state of integers that is looked up."""
    h = torch.tanh(h + functional.embedding(token, table))
    return h, h.argmax(1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 5])
def test_threads_look_up_and_check_their_own_rows(count: int) -> None:
    torch.set_num_threads(count)
    rows, width, tokens = 16, 256, torch.arange(16)
    loop = Example(follow, [torch.randn(rows, width), tokens], invariants=[torch.randn(width, width)], trip_count=50)
    assert_same_as_its_steps(loop)
    _, kernel, results = lowered(loop)
    assert kernel.parallel
    for row, token in [(0, width), (rows - 1, -1)]:
        outside = tokens.clone()
        outside[row] = token
        assert call(built(kernel), kernel, [loop.states[0], outside, *loop.invariants], results) == 1


def test_a_step_of_a_thousand_operators_has_a_kernel() -> None:
    def long(h: Tensor, x: Tensor) -> Tensor:
        for _ in range(500):
            h = h * 0.5 + x
        return h

    assert_same_as_its_steps(Example(long, [torch.randn(2, 3)], [torch.randn(3, 2, 3)]))


def batch_first(cell: StepFunction, steps: int, reverse: bool) -> Example:
    """Batch in front of time in all that is read step by step, and in what states begin from."""
    w, inputs = weight(4 * 32, 32), torch.randn(3, steps, 4 * 32)
    h, c = torch.randn(3, steps, 32)[:, 0], torch.randn(32, 3).t()
    read = StepInput(1, steps - 1, -1) if reverse else StepInput(1, 0, 1)
    if cell is lstm:
        return Example(lstm, [h, c], [inputs], [w], [read], steps)
    if cell is lstm_with_layer_norm:
        return Example(cell, [h, c], [inputs], [w.t()], [read], steps)
    table = torch.randn(32, steps, 32)[:, 1]
    return Example(elman, [h], [inputs[..., :32]], [table, torch.randn(32, steps)[:, 0]], [read], steps)


@pytest.mark.parametrize("cell", [lstm, lstm_with_layer_norm, elman], ids=lambda cell: cell.__name__)
def test_one_source_serves_all_lengths_and_directions(cell: StepFunction) -> None:
    loops = [batch_first(cell, steps, reverse) for steps in (2, 3, 50) for reverse in (False, True)]
    assert len({lowered(loop)[1].source for loop in loops}) == 1
    assert_same_as_its_steps(*loops)


def test_a_source_names_what_the_call_says_of_lengths() -> None:
    _, kernel, _ = lowered(batch_first(lstm, 50, reverse=True))
    values = [value for _, value in kernel.sizes]
    assert [name.rpartition("_")[2] for name, _ in kernel.sizes] == [
        "steps",
        "stride0",
        "first",
        "pace",
        "stride0",
        "pace",
    ]
    assert values == [50, 50 * 32, 49 * 128, -128, 50 * 128, 3 * 32]


def test_loops_that_differ_in_names_only_share_a_kernel() -> None:
    def other_names(first: Tensor, second: Tensor, third: Tensor, fourth: Tensor) -> Tensor:
        return torch.tanh(second + functional.linear(first, third, fourth))

    def subtracted(h: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(x - functional.linear(h, w, b))

    made: LoopKernels = {}
    kernels = []
    for cell, steps in ((elman, 4), (other_names, 9), (subtracted, 4)):
        one = replace(example(elman, steps, 2, 16), step=cell)
        loop = one.loop()
        kernels.append(lower_loop(loop, one.operands, list(loop(*one.operands)), made))
    first, second, third = kernels
    assert isinstance(first, Kernel)
    assert isinstance(second, Kernel)
    assert (first.source, first.sizes[0], second.sizes[0]) == (second.source, ("steps", 4), ("steps", 9))
    assert isinstance(third, Kernel)
    assert third.source != first.source


@pytest.mark.usefixtures("threads")
def test_more_steps_pay_for_more_threads_of_the_same_kernel() -> None:
    torch.set_num_threads(2)
    short, long = (example(lstm_with_layer_norm, steps, 4, 16) for steps in (1, 400))
    assert lowered(short)[1].source == lowered(long)[1].source
    assert [lowered(loop)[1].parallel for loop in (short, long)] == [False, True]
    assert_same_as_its_steps(short, long)


def test_the_kernel_of_equal_loops_is_the_same() -> None:
    assert lowered(example(gru, 4, 3, 16))[1] == lowered(example(gru, 4, 3, 16))[1]
    assert lowered(example(gru, 4, 3, 16))[1].name != lowered(example(gru, 4, 3, 17))[1].name


def _positions_of_running_maxima(h: Tensor, x: Tensor) -> Tensor:
    return h + torch.cummax(x, 1).indices


def _transposed_convolution(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return functional.conv_transpose1d(h, w) + x


STATE = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("example", "reason"),
    [
        (
            Example(_positions_of_running_maxima, [STATE], [torch.zeros(3, 2, 4)]),
            "result 1 of aten.cummax.default has no kernel",
        ),
        (
            Example(_transposed_convolution, [torch.zeros(2, 4, 5)], [torch.zeros(3, 2, 4, 5)], [torch.zeros(4, 4, 1)]),
            "transposed convolution",
        ),
        (Example(flipped, [STATE.cfloat()], [torch.zeros(3, 2, 4).cfloat()]), "complex64"),
    ],
    ids=["cummax", "transposed convolution", "complex"],
)
def test_what_has_no_kernel_is_declined_with_the_reason(example: Example, reason: str) -> None:
    _, kernel, _ = lower(example)
    assert isinstance(kernel, Declined)
    assert reason in kernel.reason


class SoftWarping(nn.Module):
    """The soft minimum of the costs of all paths through a matrix, each cell of a row read by the next one."""

    def forward(self, costs: Tensor) -> Tensor:
        batch, rows, columns = costs.shape
        r = torch.full((batch, rows + 1, columns + 1), 1e4)
        r[:, 0, 0] = 0
        for i in range(rows):
            for j in range(columns):
                a, b, c = -r[:, i, j], -r[:, i, j + 1], -r[:, i + 1, j]
                most = torch.maximum(torch.maximum(a, b), c)
                total = torch.exp(a - most) + torch.exp(b - most) + torch.exp(c - most)
                r[:, i + 1, j + 1] = costs[:, i, j] - most - torch.log(total)
        return r[:, -1, -1]


def test_a_row_of_cells_takes_code_in_proportion_to_its_length() -> None:
    lengths = []
    for columns, launches in ((4, 3), (8, 4)):
        model, costs = SoftWarping(), torch.rand(3, 6, columns)
        assert_fuses(model, costs, launches=launches)
        fused = fuse.compile(model)
        fused(costs)
        lengths.append(sum(len(kernel.source) for kernel in fused.compiled.program.kernels.values()))
    assert lengths[1] < 2 * lengths[0], lengths
