"""Lower a loop to one persistent kernel, which runs all steps with states and weights in cache.

    loop(h0, xs, w)  ->  step (values, products)  ->  threads share out units, or rows of the batch  ->  C++

The schedule by units is tried first. It suits recurrent cells, whose products read the whole state. The schedule by
rows handles what it cannot: norms, softmax, states of other shapes, steps without products.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from torch import Tensor

from fuse.graph.loop import Loop
from fuse.kernel.arithmetic.extents import Conditions, NeedsNumber, smaller
from fuse.kernel.arithmetic.index import Size
from fuse.kernel.cpu.loop_frame import ThreadFunction, indented, reads_sizes
from fuse.kernel.cpu.loop_rows import rows_text
from fuse.kernel.cpu.loop_units import units_text
from fuse.kernel.cpu.names import is_reserved_in_loops
from fuse.kernel.cpu.product_frame import ALIGNMENT, PACKING, several
from fuse.kernel.cpu.work import PARALLEL_WORK
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.loops.loop_nests import Frame
from fuse.kernel.loops.loop_sizes import sizes_of, strides_in
from fuse.kernel.loops.loop_stages import Cut, Kept
from fuse.kernel.loops.loop_step import read_step
from fuse.kernel.lower import MAX_NAME_PARTS, attempt, serve, structure
from fuse.kernel.names import plain_name
from fuse.kernel.sizes.region_text import Numbers, text_and_numbers, with_numbers
from fuse.kernel.sizes.sized import Text, call_at_hand
from fuse.kernel.target import LoopKernels
from fuse.kernel.values import Ranked, Solved

HEADERS = ("threads.h", "products.h")
HEADERS_OF = {Ranked: "ranking.h", Solved: "small_matrices.h"}
"""The header of a kind of value."""

Schedule = Callable[[Frame, str], ThreadFunction]


def loop_kernel(
    loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor], made: LoopKernels | None = None
) -> Kernel | Declined:
    """The kernel that runs all steps of ``loop``; see :func:`fuse.kernel.loops.lower_loops.lower_loop`."""
    key = loop_structure(loop, operands, results)
    found = made.get(key) if made is not None else None
    if found is None:
        if (serving := _for_sizes(loop, operands, results)) is not None:
            return serving
        found = _lowered(loop, operands, results)
        if made is not None:
            made[key] = found
    if isinstance(found, Declined):
        return found
    names, result_names = [""] * len(operands), [""] * len(results)
    sizes = sizes_of(loop.spec, operands, results, names, result_names)
    return replace(found, sizes=tuple((name, s.value) for (name, _), s in zip(found.sizes, sizes, strict=True)))


def loop_structure(loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor]) -> Hashable:
    """A key that is equal for loops that one kernel serves; these may differ in names, lines and lengths."""
    spec = loop.spec
    dims = [read.dim for read in spec.step_inputs]
    without = [None] * spec.carries + dims + [None] * (len(operands) - spec.carries - len(dims))
    strides = [strides_in(operand, str(i), dim) for i, (operand, dim) in enumerate(zip(operands, without, strict=True))]
    ends = [strides_in(r, str(i), None if i < spec.carries else 0) for i, r in enumerate(results)]
    dtypes = [value.dtype for value in (*operands, *results)]
    how = spec.carries, spec.backwards, spec.stop
    return structure(loop.body, named=False), how, tuple(strides), tuple(ends), tuple(dtypes)


def _lowered(
    loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor], varying: tuple[Size, ...] = ()
) -> Kernel | Declined:
    if not loop.spec.carries:
        return Declined("no state is carried from step to step")
    schedules: tuple[tuple[Schedule, Cut], ...] = (
        (units_text, "as needed"),
        (rows_text, "concatenations"),
        (rows_text, "reductions"),
    )
    for schedule, cut in schedules:
        found = attempt(lambda: _scheduled(loop, operands, results, varying, schedule, cut))  # noqa: B023 (called at once)
        if isinstance(found, Kernel):
            break
    return found


_TEXTS: dict[str, Text[Kernel]] = {}


def _for_sizes(loop: Loop, operands: Sequence[Tensor], results: Sequence[Tensor]) -> Kernel | None:
    """A kernel of a loop that serves other sizes too; None if no size varies or there is no such kernel."""
    if (call := call_at_hand()) is None:
        return None
    spec = loop.spec
    how = f"{spec.carries} {spec.backwards} {spec.stop} {[read.dim for read in spec.step_inputs]}"
    extra = (how, spec.trip_count, [(read.start, read.step) for read in spec.step_inputs], *operands, *results)
    spelling, numbers = text_and_numbers(loop.body, lambda node: plain_name(node.name), extra)

    def lowered(values: Numbers, conditions: Conditions) -> Kernel | None:
        body, (_, steps, ends, *tensors) = with_numbers(loop.body, values, extra)
        reads = [replace(read, start=a, step=b) for read, (a, b) in zip(spec.step_inputs, ends, strict=True)]
        other = Loop(body, replace(spec, trip_count=steps, step_inputs=tuple(reads)))
        varying = tuple(Size(name, conditions.extent(name)) for name in conditions.sizes)
        inputs, outputs = tensors[: len(operands)], tensors[len(operands) :]
        try:
            made = _lowered(other, inputs, outputs)
            if isinstance(made, Kernel) and _names(made.source) & set(conditions.sizes):
                made = _lowered(other, inputs, outputs, varying)  # sizes other than the length vary: pass them too
        except NeedsNumber:
            return None
        return made if isinstance(made, Kernel) else None

    occurrence = call.occurrence(spelling, numbers)
    return serve(_TEXTS.setdefault(spelling, Text()), numbers, occurrence, call.sizes, lowered)


def _names(source: str) -> set[str]:
    """The identifiers in a kernel's source."""
    return set(re.findall(r"[A-Za-z_]\w*", source))


def _scheduled(
    loop: Loop,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    varying: tuple[Size, ...],
    schedule: Schedule,
    cut: Cut,
) -> Kernel:
    step = read_step(loop, operands, cut, PACKING, is_reserved_in_loops)
    return _kernel(Frame(step, loop.spec, tuple(operands), tuple(results), varying), schedule)


def _kernel(frame: Frame, schedule: Schedule) -> Kernel:
    share = schedule(frame, "LOOP")
    comment = "".join(f"// {line}\n" for line in frame.step.lines)
    entry = _entry(frame, share)
    digest = hashlib.sha256(f"{share.workspace} {comment} {share.text} {entry}".encode()).hexdigest()[:8]
    parts = list(dict.fromkeys(frame.step.value_names.values()))[:MAX_NAME_PARTS]
    name = "_".join(["loop", *parts, digest])
    source = comment + (share.text + entry).replace("LOOP", name)
    sizes = tuple((size.name, size.value) for size in frame.sizes)
    parallel = several(threads_that_pay(share, frame.spec.trip_count))
    memory = share.workspace + ALIGNMENT
    kept = {type(stage.value) for stage in frame.step.stages if isinstance(stage, Kept)}
    headers = (*HEADERS, *(header for kind, header in HEADERS_OF.items() if kind in kept))
    return Kernel(name, source, frozenset(), parallel, memory, sizes, headers, share.schedule)


def threads_that_pay(share: ThreadFunction, steps: int) -> int:
    """Number of threads that pay for a loop with this number of steps."""
    return share.threads if share.work is None else smaller(share.threads, 1 + share.work * steps // PARALLEL_WORK)


def _entry(frame: Frame, share: ThreadFunction) -> str:
    """The C++ entry point, which starts the number of threads that :func:`threads_that_pay` gives."""
    threads = str(share.threads)
    lines = reads_sizes(frame, {size.name for size in frame.varying}) if frame.varying else []
    if share.work is not None and several(share.threads):
        sizes = len(frame.operands) + len(frame.results) + 1
        lines += [
            f"const int64_t steps = *(const int64_t *)args[{sizes}];",
            f"const int64_t threads = 1 + {share.work} * steps / {PARALLEL_WORK};",
        ]
        threads = f"threads < {share.threads} ? threads : {share.threads}"
    lines.append(f"return fuse_run_team(LOOP_share, args, {threads});")
    return "\n".join(['extern "C" int LOOP(char *const *args) {', *indented(1, lines), "}\n"])
