"""Definitions of products, convolutions, attention and loops in the IR alone: for reading, and as a target's default.

    relu(x @ w)            ->    for each row and column: product = sum of x * w;   then relu of it
    loop(h0, xs, w)        ->    for step in steps: a nest for each product, then the next states, then what is kept

A region without products is scheduled as for any target. Products, convolutions, attention and loops have schedules of
a target's own (tiles, packed panels, threads that meet at barriers); here each product is a nest like any other, its
result is in memory, and the time is the outermost loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fuse.graph.loop import Loop, Stop
from fuse.graph.strides import contiguous_strides
from fuse.kernel import contractions
from fuse.kernel.convolutions import Window, patches
from fuse.kernel.index import ZERO, Affine, Index, NotAffine, Size, offset
from fuse.kernel.ir import (
    Buffer,
    Comment,
    Declare,
    For,
    Indirect,
    KernelBody,
    Load,
    Scope,
    Statement,
    Store,
)
from fuse.kernel.loop_nests import (
    Destination,
    Frame,
    elements,
    lasts_of,
    nest,
    operand_name,
    result_name,
    results_of,
    starts_of,
)
from fuse.kernel.loop_stages import Cut, Kept, Stage
from fuse.kernel.loop_step import read_step
from fuse.kernel.multi_stage import read_from_memory
from fuse.kernel.packing import Packing
from fuse.kernel.placement import StridedPlace, placement
from fuse.kernel.schedule import schedule
from fuse.kernel.values import (
    Computation,
    Correlation,
    Input,
    Patches,
    PatchRows,
    Product,
    Reindex,
    Shape,
    Value,
    expand,
    permute,
    view,
)
from fuse.kernel.walks import within_stage

UNPACKED = Packing(panel=1, most_panels=1, largest_block=1 << 20)
"""Products here read their right operand as it lies."""

CUTS: tuple[Cut, ...] = ("as needed", "concatenations", "reductions")
"""Values of a step that are in memory before they are read: as few as possible."""


def defined(computation: Computation) -> KernelBody:
    """A region in the IR, products among its loops.

    Raises:
        NotAffine, Unsupported: it has no such loops; the message is a reason.
    """
    roots = [output.value for output in computation.outputs]
    products = [v for v in within_stage(roots, through_reductions=True) if isinstance(v, (Product, Correlation))]
    if not products:
        return schedule(computation)
    first = len(computation.inputs)
    operands = [operand for product in products for operand in _operands(product)]
    values, names = read_from_memory([*roots, *operands], products, first, computation.value_names)
    held = [Input(p.shape, p.dtype, first + i, contiguous_strides(p.shape)) for i, p in enumerate(products)]
    inputs = (*computation.inputs, *held)
    called = _free("product", computation.names.values())
    names_of_inputs = {**computation.names, **{h.position: f"{called}_{i}" for i, h in enumerate(held)}}
    pairs = zip(values[len(roots) :: 2], values[len(roots) + 1 :: 2], strict=True)
    statements: list[Statement] = []
    for memory, (left, right) in zip(held, pairs, strict=True):
        name = names_of_inputs[memory.position]
        buffer = Buffer(name, memory.dtype, "scratch", math.prod(memory.shape))
        to = Destination(_contracted(left, right), name, memory.strides)
        statements += [Declare(buffer), *_block(nest(inputs, names_of_inputs, [to], names))]
    outputs = tuple(replace(output, value=value) for output, value in zip(computation.outputs, values, strict=False))
    body = schedule(Computation(inputs, outputs, names_of_inputs, names, computation.lines))
    return replace(body, inputs=body.inputs[:first], statements=(*statements, *body.statements))


def _free(stem: str, taken: Iterable[str]) -> str:
    """A stem that begins no name that is taken."""
    while any(name.startswith(stem) for name in taken):
        stem += "_"
    return stem


def _contracted(left: Value, right: Value) -> Value:
    """``left @ right`` as sums; either may be one matrix, or fewer than the other, which are used again and again."""
    images = max(left.shape[0] if len(left.shape) == 3 else 0, right.shape[0] if len(right.shape) == 3 else 0)
    if images:
        left, right = _repeated(left, images), _repeated(right, images)
    return contractions.product(left, right, lambda sums: sums)


def _repeated(matrices: Value, images: int) -> Value:
    """One matrix for each image: ``a b a b a b`` of ``a b``."""
    *own, rows, columns = matrices.shape
    each = math.prod(own)
    spread = expand(view(matrices, (1, each, rows, columns)), (images // each, each, rows, columns))
    return view(spread, (images, rows, columns))


def _block(statements: Sequence[Statement]) -> list[Statement]:
    """Statements whose names are seen by no others."""
    return [Scope(tuple(statements))] if any(not isinstance(s, (For, Scope)) for s in statements) else [*statements]


def _operands(product: Product | Correlation) -> tuple[Value, Value]:
    """Both operands as index arithmetic."""
    if isinstance(product, Product):
        return _as_rows(product.left), _as_rows(product.right)
    (groups, outputs, depth), (images, _, places) = product.shape, product.left.shape
    batch = images // groups
    left = permute(view(product.left, (batch, groups, outputs, places)), (1, 2, 0, 3))
    right = permute(view(_as_rows(product.right), (batch, groups, depth, places)), (1, 0, 3, 2))
    return view(left, (groups, outputs, batch * places)), view(right, (groups, batch * places, depth))


def _as_rows(operand: Value) -> Value:
    """A product's operand as index arithmetic: the patches of a convolution read its padded image."""
    if not isinstance(operand, Patches):
        return operand
    image, (batch, channels) = operand.source, operand.source.shape[:2]
    if place := placement(image):  # one piece of arithmetic, where views of views would ask for loops to be split
        image = _lying(place, image.shape, {})
    window = Window(operand.stride, operand.padding, operand.dilation)
    rows = patches(image, window, operand.taps, operand.places, 1)  # [1, batch * places, channels * taps]
    taps, places = math.prod(operand.taps), math.prod(operand.places)
    if not isinstance(operand, PatchRows):
        return permute(view(rows, (batch, places, channels * taps)), (0, 2, 1))
    return view(permute(view(rows, (batch, places, channels, taps)), (0, 1, 3, 2)), operand.shape)


def _lying(place: StridedPlace, shape: Shape, sizes: Mapping[str, int]) -> Value:
    """A value stored in this order, by the number of an element."""
    start, *strides = (_known(number, sizes).constant for number in (place.start, *place.strides))
    extent = 1 + start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = Input((extent,), place.source.dtype, place.source.position, (1,))

    def where(index: Index, extents: Mapping[str, int]) -> Index:
        return (offset(index, strides) + start,)

    return Reindex(shape, memory.dtype, memory, where)


# ---- loops -----------------------------------------------------------------------------------------------------------

STEP = "step"
"""The loop variable of time."""


def defined_loop(
    loop: Loop,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    is_kept: Callable[[str], bool] = lambda name: False,
) -> KernelBody:
    """A loop in the IR; ``operands`` and ``results`` as :func:`fuse.kernel.lower_loops.lower_loop` has them.

    ``is_kept`` says which names the target keeps for itself. A loop that may end early is written without its end; a
    comment says when it ends.

    Raises:
        NotAffine, Unsupported: a step has no such loops; the message is a reason.
    """
    for cut in CUTS:
        step = read_step(loop, operands, cut, UNPACKED, lambda name: name == STEP or is_kept(name))
        try:
            return _driven(Frame(step, loop.spec, tuple(operands), tuple(results)))
        except NotAffine as why:
            reason = why
    raise reason


def _driven(frame: Frame) -> KernelBody:
    """States from their start to the end of the last step, and what is kept of each."""
    step, spec = frame.step, frame.spec
    inputs = [Buffer(operand_name(frame, i), o.dtype, "input") for i, o in enumerate(frame.operands)]
    outputs = [Buffer(result_name(frame, i), r.dtype, "output") for i, r in enumerate(frame.results)]
    stored = [(frame.name(value), value) for value in (*frame.states, *(stage.result for stage in step.stages))]
    stored += [(f"{frame.name(state)}_next", state) for state in frame.states]
    own = [Buffer(name, value.dtype, "scratch", elements(value)) for name, value in stored]
    states = [Destination(state, frame.name(state), state.strides) for state in frame.states]
    starts, start_names, _ = starts_of(frame)
    ready = _nest(starts, start_names, [replace(to, value=at) for to, at in zip(states, starts, strict=True)])
    each = [_nest(step.inputs, step.names, [_stored(frame, stage)], step.value_names) for stage in step.stages]
    each.append(_nest(step.inputs, step.names, results_of(frame), step.value_names))
    next_names = {state.position: f"{frame.name(state)}_next" for state in frame.states}
    each.append(_nest(frame.states, next_names, states))
    if spec.stop is not None:
        each.append([_end(spec.stop, step.result_names[spec.carries + spec.stop.collected])])
    steps = For(STEP, spec.trip_count, tuple(statement for statements in each for statement in statements))
    last = _nest(frame.states, step.names, lasts_of(frame))
    places = {buffer.name: (buffer, ZERO) for buffer in (*inputs, *outputs, *own)} | _parts(frame, inputs, outputs)
    sizes = {size.name: size.value for size in frame.sizes}
    body = [_placed(statement, places, sizes) for statement in (*ready, steps, *last)]
    return KernelBody(tuple(inputs), tuple(outputs), (*map(Declare, own), *body), step.lines)


def _nest(
    inputs: Sequence[Input], names: Mapping[int, str], to: Sequence[Destination], value_names: Mapping[int, str] = {}
) -> list[Statement]:
    return _block(nest(inputs, names, to, value_names))


def _stored(frame: Frame, stage: Stage) -> Destination:
    """A stage and its memory: a product is the sum that it stands for."""
    if isinstance(stage, Kept):
        return Destination(stage.value, frame.name(stage.result), stage.result.strides)
    shape = (stage.left.shape[1], stage.result.shape[1])
    right = _lying(stage.right, shape, {size.name: size.value for size in frame.sizes})
    return Destination(_contracted(stage.left, right), frame.name(stage.result), stage.result.strides)


def _parts(frame: Frame, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> dict[str, tuple[Buffer, Affine]]:
    """A step's part of each input and of each result that is kept, by its name: the memory around it, and where."""
    spec, step, time = frame.spec, frame.step, Affine.of(STEP)
    found = {}
    for position, read in enumerate(spec.step_inputs, spec.carries):
        stride = frame.operands[position].stride(read.dim)
        found[step.names[position]] = inputs[position], (time * read.step + read.start) * stride
    for number in range(spec.carries, len(outputs)):
        place = time * -1 + (spec.trip_count - 1) if spec.backwards else time
        found[step.result_names[number]] = outputs[number], place * frame.results[number].stride(0)
    return found


def _placed(statement: Statement, places: Mapping[str, tuple[Buffer, Affine]], sizes: Mapping[str, int]) -> Statement:
    """The statement with the memory that names stand for, and numbers in place of sizes."""
    if isinstance(statement, (For, Scope)):
        return replace(statement, body=tuple(_placed(s, places, sizes) for s in statement.body))
    if not isinstance(statement, (Load, Store)):
        return statement
    buffer, start = places.get(statement.buffer.name, (statement.buffer, ZERO))
    placed = replace(statement, buffer=buffer, offset=_known(statement.offset, sizes) + start)
    if isinstance(placed, Store):
        return placed
    return replace(placed, indirect=tuple(_known_stride(term, sizes) for term in placed.indirect))


def _known_stride(term: Indirect, sizes: Mapping[str, int]) -> Indirect:
    return replace(term, stride=sizes[term.stride.name]) if isinstance(term.stride, Size) else term


def _known(where: Affine, sizes: Mapping[str, int]) -> Affine:
    """The same index with numbers in place of sizes."""
    total = Affine(where.terms, where.constant)
    for name, factor in where.sized:
        total += factor * sizes[name]
    return total


def _end(stop: Stop, truth: str) -> Comment:
    states = "behind" if stop.whole else "in front of"
    return Comment(f"ends where {truth} is {not stop.goes_on}: the last states are those {states} that step")
