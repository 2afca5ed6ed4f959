"""Schedule of a loop kernel by rows: each thread runs all steps for its own rows of the batch, without barriers.

    rows first_row ... last_row, for all steps:
        gates = h @ W           weights packed once, a few rows at a time
        c, h  = f(gates, c)     a loop nest as in any kernel

It suits reductions over units (norms, softmax), large batches and steps without products. One thread runs the whole
loop if a row of the batch reads another row, if there is no batch, or if a condition may stop the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fuse.graph.loop import Stop
from fuse.kernel.arithmetic.extents import is_one
from fuse.kernel.arithmetic.index import Affine, NotAffine
from fuse.kernel.cpu import cpp_types
from fuse.kernel.cpu.emit import text_of
from fuse.kernel.cpu.loop_batch import rows_of_batch, share_of_rows
from fuse.kernel.cpu.loop_frame import (
    ThreadFunction,
    Workspace,
    indented,
    packing,
    pointers,
    stage_memory,
    state_pointers,
    step_pointers,
    waiting,
)
from fuse.kernel.cpu.product_frame import PACKING, PANEL
from fuse.kernel.cpu.work import work
from fuse.kernel.ir import Statement
from fuse.kernel.loops.loop_nests import Destination, Frame, lasts_of, nest, results_of, starts_of
from fuse.kernel.loops.loop_stages import StepProduct
from fuse.kernel.traversals import WORTH_KEEPING, within_stage
from fuse.kernel.values import Input, Map, Reduce, Value

_INDENT = "    "


_Nest = list[Statement]


def rows_text(frame: Frame, name: str) -> ThreadFunction:
    """The function of one thread, called ``name``.

    Raises:
        NotAffine: the step has no such loops; the message is a reason for the user.
    """
    step = frame.step
    sources, start_names, starts = starts_of(frame)
    before = nest(sources, start_names, starts, {})
    after = nest(frame.states, step.names, lasts_of(frame), {})
    stages: list[_Nest | StepProduct] = [
        stage if isinstance(stage, StepProduct) else _nest(frame, stage) for stage in _in_order(frame)
    ]
    products = [s for s in stages if isinstance(s, StepProduct)]
    nests = [s for s in stages if not isinstance(s, StepProduct)]
    stop = frame.spec.stop
    batch = rows_of_batch(frame, [before, after, *nests]) if stop is None else 1

    workspace = Workspace()
    head = pointers(frame, workspace)
    stage_memory(frame, workspace, step.stages)
    packed = []
    for number, product in enumerate(products):
        real = product.result.dtype
        size = product.left.shape[1] * PACKING.padded(product.result.shape[1])
        workspace.take(f"weights_{number}", cpp_types.storage(real), size, real.itemsize)
        packed += _packed(frame, number, product)
        packed += waiting("row", batch) if not is_one(batch) else []
    lines = [f"static int {name}_share(char *const *args, fuse_team *team, int64_t member) {{"]
    lines += indented(1, head + workspace.lines)
    if not is_one(batch):
        lines += indented(1, [f"const int64_t first_row = {batch} * member / team->members;"])
        lines += indented(1, [f"int64_t last_row = {batch} * (member + 1) / team->members;"])
    lines += indented(1, packed)
    lines += text_of(share_of_rows(before, batch), 1)
    if stop is not None:
        lines += indented(1, ["int64_t taken_steps = steps;"])
    lines += indented(1, ["for (int64_t t = 0; t < steps; ++t) {"])
    lines += indented(2, step_pointers(frame))
    for stage in stages:
        if isinstance(stage, StepProduct):
            lines += indented(2, _multiplied(frame, products.index(stage), stage, batch))
        else:
            lines += text_of(share_of_rows(stage, batch), 2)
    if stop is not None:
        lines += indented(2, _stopping(frame, stop))
    lines += indented(1, ["}"])
    for state in frame.states:
        lines += indented(1, state_pointers(frame, state, "steps" if stop is None else "taken_steps")[:1])
    lines += text_of(share_of_rows(after, batch), 1)
    lines += [*indented(1, ["return 0;"]), "}"]
    effort = sum(PACKING.padded(p.result.shape[1]) * p.result.shape[0] * p.left.shape[1] // PANEL for p in products)
    effort += sum(work(s) for statements in nests for s in statements)
    shared = "one thread" if is_one(batch) else "threads share out rows of the batch, and never wait in a step"
    schedule = f"weights packed once; {shared}" if products else shared
    return ThreadFunction("\n".join(lines) + "\n", workspace.size, batch, schedule, effort)


def _stopping(frame: Frame, stop: Stop) -> list[str]:
    """Lines that leave the loop if this step's condition says so, and set the condition of all later steps to the
    same."""
    name = frame.step.result_names[frame.spec.carries + stop.collected]
    return [
        f"if ((*{name} != 0) != {str(stop.goes_on).lower()}) {{",
        f"{_INDENT}taken_steps = t + {int(stop.whole)};",
        f"{_INDENT}while (++t < steps) {name}_steps[t * {name}_pace] = *{name};",
        f"{_INDENT}break;",
        "}",
    ]


def _nest(frame: Frame, destinations: Sequence[Destination]) -> _Nest:
    """The loops of destinations that read nothing of one another: one nest where they fit, else one for each."""
    step = frame.step
    try:
        return nest(step.inputs, step.names, destinations, step.value_names)
    except NotAffine:
        if len(destinations) == 1:
            raise
        return [s for one in destinations for s in nest(step.inputs, step.names, [one], step.value_names)]


def _in_order(frame: Frame) -> list[StepProduct | list[Destination]]:
    """The products of a step, and what is computed together before, between and after them: values that share work.

    x = f(sum(a));  p = x @ v;  y = g(sum(a));  q = y @ w;  z = h(x, p)      ->      x and y;  p;  q;  z

    Without this, each factor of a product would compute again all that it is made of.
    """
    found: list[StepProduct | list[Destination]] = []
    stored: dict[int, int] = {}  # position of an input -> the place in ``found`` that stores it
    kept: dict[int, Value] = {}
    work: dict[int, dict[int, Value]] = {}

    def together(value: Value, least: int) -> list[Destination] | None:
        """The first place that has all that ``value`` reads, and shares work that costs at least ``least``."""
        read = within_stage([value], through_reductions=True)
        ready = max((stored.get(v.position, -1) for v in read if isinstance(v, Input)), default=-1)
        own = _work(value)
        places = (n for n, done in work.items() if n > ready and _cost(done[i] for i in done.keys() & own) >= least)
        place = next(places, None)
        if place is None:
            return None
        work[place] |= own
        destinations = found[place]
        assert isinstance(destinations, list)
        return destinations

    for stage in frame.step.stages:
        if isinstance(stage, StepProduct):
            found.append(stage)
            stored[stage.result.position] = len(found) - 1
            continue
        destinations = together(stage.value, WORTH_KEEPING)
        if destinations is None:
            work[len(found)] = _work(stage.value)
            destinations = []
            found.append(destinations)
        destinations.append(Destination(stage.value, frame.name(stage.result), stage.result.strides))
        stored[stage.result.position] = next(n for n, one in enumerate(found) if one is destinations)
        kept[stage.result.position] = stage.value
    last: list[Destination] = []
    for result in results_of(frame):
        position = result.value.position if isinstance(result.value, Input) else -1
        if position in kept:
            place = found[stored[position]]
            assert isinstance(place, list)
            place.append(replace(result, value=kept[position]))
        else:
            (together(result.value, 1) or last).append(result)
    return [*found, last]


def _work(value: Value) -> dict[int, Value]:
    """All maps and reductions below ``value``, by id, copies left out."""
    below = within_stage([value], through_reductions=True)
    return {id(v): v for v in below if isinstance(v, (Map, Reduce)) and not (isinstance(v, Map) and v.is_copy)}


def _cost(values: Iterable[Value]) -> int:
    """The cost of values for an element; a reduction costs as much as is worth computing once."""
    return sum(v.cost if isinstance(v, Map) else WORTH_KEEPING for v in values)


# ---- products ------------------------------------------------------------------------------------------------------


def _packed(frame: Frame, number: int, product: StepProduct) -> list[str]:
    """Lines that pack a weight; each thread packs some of its blocks."""
    columns, depth = product.result.shape[1], product.left.shape[1]
    panels = PACKING.panels_in_block(columns)
    width = PANEL * panels
    blocks = -(-columns // width)
    name = frame.name(product.right.source)
    lines = [f"for (int64_t block = member; block < {blocks}; block += team->members) {{"]
    target = f"weights_{number} + block * {depth * width}"
    for panel in range(panels):
        column = f"{width} * block + {PANEL * panel}"
        lines.append(_INDENT + packing(target, panels, panel, product.right, name, depth, column, columns))
    return [*lines, "}"]


def _multiplied(frame: Frame, number: int, product: StepProduct, batch: int) -> list[str]:
    """Lines that compute a product for the rows of this thread."""
    rows, depth = product.left.shape
    panels = PACKING.panels_in_block(product.result.shape[1])
    width, wide = PANEL * panels, PACKING.padded(product.result.shape[1])
    left, out, first, count = frame.name(product.left), frame.name(product.result), "", str(rows)
    stride = product.left.strides[0]
    if not is_one(batch):
        each = rows // batch
        left += f" + {(Affine.of('first_row') * each).times(stride)}"
        first = f" + first_row * {each * wide}"
        count = f"(last_row - first_row) * {each}"
    return [
        f"for (int64_t block = 0; block < {wide // width}; ++block) {{",
        f"{_INDENT}fuse_product_even<{panels}>({out}{first} + block * {width}, {wide}, {PANEL}, {left}, {stride},",
        f"{_INDENT}{' ' * 21}weights_{number} + block * {depth * width}, {depth}, {count});",
        "}",
    ]
