"""Products, convolutions, attention and loops defined as plain loops of the IR: for reading, and as a target's default.

    relu(x @ w)            ->    for each row and column: product = sum of x * w;   then relu of it
    loop(h0, xs, w)        ->    for step in steps: a nest for each product, then the next states and collected outputs

A target schedules products, convolutions, attention and loops in its own way (tiles, packed panels, barriers). Here
each product is a loop nest like any other with its result in memory, and the steps of a loop are the outermost loop. A
region without products gets the schedule that every target uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fuse.graph.loop import Loop, Stop
from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.index import ZERO, Affine, Index, NotAffine, Size, offset
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
from fuse.kernel.loops.loop_nests import (
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
from fuse.kernel.loops.loop_stages import Cut, Kept, Stage
from fuse.kernel.loops.loop_step import read_step
from fuse.kernel.nests.multi_stage import read_from_memory
from fuse.kernel.nests.schedule import schedule
from fuse.kernel.packing import Packing
from fuse.kernel.placement import StridedPlace, placement
from fuse.kernel.recipes import contractions
from fuse.kernel.recipes.convolutions import Window, patches
from fuse.kernel.recipes.registry import Unsupported
from fuse.kernel.traversals import within_stage
from fuse.kernel.values import (
    Computation,
    Correlation,
    Input,
    Patches,
    PatchRows,
    Product,
    Reindex,
    Shape,
    SpreadPatches,
    Value,
    expand,
    permute,
    view,
)

UNPACKED = Packing(panel=1, most_panels=1, largest_block=1 << 20)
"""The packing of a target whose products read their right operand in place."""

CUTS: tuple[Cut, ...] = ("as needed", "concatenations", "reductions")
"""Choices of the values of a step that are stored before they are read, fewest first."""


def defined(computation: Computation) -> KernelBody:
    """The loop nests of a region, its products included.

    Raises:
        NotAffine, Unsupported: the region has no such loops; the message is a reason for the user.
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
    called = "product"
    while any(name.startswith(called) for name in computation.names.values()):
        called += "_"
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


def _contracted(left: Value, right: Value) -> Value:
    """``left @ right`` as a sum of products; the operand with fewer matrices is repeated."""
    images = max(left.shape[0] if len(left.shape) == 3 else 0, right.shape[0] if len(right.shape) == 3 else 0)
    if images:
        left, right = _repeated(left, images), _repeated(right, images)
    return contractions.product(left, right, lambda sums: sums)


def _repeated(matrices: Value, images: int) -> Value:
    """``matrices`` repeated to one for each image: ``a b`` becomes ``a b a b a b``."""
    *own, rows, columns = matrices.shape
    each = math.prod(own)
    spread = expand(view(matrices, (1, each, rows, columns)), (images // each, each, rows, columns))
    return view(spread, (images, rows, columns))


def _block(statements: Sequence[Statement]) -> list[Statement]:
    """The statements in a scope, unless they define no names outside of loops."""
    return [Scope(tuple(statements))] if any(not isinstance(s, (For, Scope)) for s in statements) else [*statements]


def _operands(product: Product | Correlation) -> tuple[Value, Value]:
    """Both operands of ``left @ right``, patches and correlations spelled out as index arithmetic."""
    if isinstance(product, Product):
        return _as_rows(product.left), _as_rows(product.right)
    (groups, outputs, depth), (images, _, pixels) = product.shape, product.left.shape
    batch = images // groups
    left = permute(view(product.left, (batch, groups, outputs, pixels)), (1, 2, 0, 3))
    right = permute(view(_as_rows(product.right), (batch, groups, depth, pixels)), (1, 0, 3, 2))
    return view(left, (groups, outputs, batch * pixels)), view(right, (groups, batch * pixels, depth))


def _as_rows(operand: Value) -> Value:
    """The patches of a convolution as reads of its padded image; other operands unchanged.

    Raises:
        Unsupported: patches of a transposed convolution.
    """
    if not isinstance(operand, Patches):
        return operand
    if isinstance(operand, SpreadPatches):
        raise Unsupported("the loops of a transposed convolution are not affine")
    image, (batch, channels) = operand.source, operand.source.shape[:2]
    if place := placement(image):  # one affine index; views of views would need their loops split
        image = _stored_in_order(place, image.shape, {})
    window = Window(operand.stride, operand.padding, operand.dilation)
    rows = patches(image, window, operand.taps, operand.output_size, 1)  # [1, batch * pixels, channels * taps]
    taps, pixels = math.prod(operand.taps), math.prod(operand.output_size)
    if isinstance(operand, PatchRows) and operand.by_channel:
        return view(rows, operand.shape)
    if not isinstance(operand, PatchRows):
        return permute(view(rows, (batch, pixels, channels * taps)), (0, 2, 1))
    return view(permute(view(rows, (batch, pixels, channels, taps)), (0, 1, 3, 2)), operand.shape)


def _stored_in_order(place: StridedPlace, shape: Shape, sizes: Mapping[str, int]) -> Value:
    """A value of this shape at ``place`` in an input's memory, with numbers for ``sizes``."""
    start, *strides = (_known(number, sizes).constant for number in (place.start, *place.strides))
    extent = 1 + start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = Input((extent,), place.source.dtype, place.source.position, (1,))

    def where(index: Index, extents: Mapping[str, int]) -> Index:
        return (offset(index, strides) + start,)

    return Reindex(shape, memory.dtype, memory, where)


# ---- loops -----------------------------------------------------------------------------------------------------------

STEP = "step"
"""The loop variable over the steps of a loop."""


def defined_loop(
    loop: Loop,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    is_reserved: Callable[[str], bool] = lambda name: False,
) -> KernelBody:
    """All steps of a loop in the IR; ``operands`` and ``results`` are those of
    :func:`fuse.kernel.loops.lower_loops.lower_loop`.

    ``is_reserved`` tells names that the target reserves. For a loop that may end early, a comment states the condition;
    the IR runs all steps.

    Raises:
        NotAffine, Unsupported: a step has no such loops; the message is a reason for the user.
    """
    for cut in CUTS:
        step = read_step(loop, operands, cut, UNPACKED, lambda name: name == STEP or is_reserved(name))
        try:
            return _all_steps(Frame(step, loop.spec, tuple(operands), tuple(results)))
        except NotAffine as why:
            reason = why
    raise reason


def _all_steps(frame: Frame) -> KernelBody:
    """The statements that copy the start states, run all steps, and store last states and collected outputs."""
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
    memory = {buffer.name: (buffer, ZERO) for buffer in (*inputs, *outputs, *own)} | _parts(frame, inputs, outputs)
    sizes = {size.name: size.value for size in frame.sizes}
    body = [_placed(statement, memory, sizes) for statement in (*ready, steps, *last)]
    return KernelBody(tuple(inputs), tuple(outputs), (*map(Declare, own), *body), step.lines)


def _nest(
    inputs: Sequence[Input], names: Mapping[int, str], to: Sequence[Destination], value_names: Mapping[int, str] = {}
) -> list[Statement]:
    return _block(nest(inputs, names, to, value_names))


def _stored(frame: Frame, stage: Stage) -> Destination:
    """The value and memory of a stage; a product is written as a sum."""
    if isinstance(stage, Kept):
        return Destination(stage.value, frame.name(stage.result), stage.result.strides)
    shape = (stage.left.shape[1], stage.result.shape[1])
    right = _stored_in_order(stage.right, shape, {size.name: size.value for size in frame.sizes})
    return Destination(_contracted(stage.left, right), frame.name(stage.result), stage.result.strides)


def _parts(frame: Frame, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> dict[str, tuple[Buffer, Affine]]:
    """By name of a step input or collected output: the buffer with all steps, and the offset of this step's part."""
    spec, step, time = frame.spec, frame.step, Affine.of(STEP)
    found = {}
    for position, read in enumerate(spec.step_inputs, spec.carries):
        stride = frame.operands[position].stride(read.dim)
        found[step.names[position]] = inputs[position], (time * read.step + read.start) * stride
    for number in range(spec.carries, len(outputs)):
        place = time * -1 + (spec.trip_count - 1) if spec.backwards else time
        found[step.result_names[number]] = outputs[number], place * frame.results[number].stride(0)
    return found


def _placed(statement: Statement, memory: Mapping[str, tuple[Buffer, Affine]], sizes: Mapping[str, int]) -> Statement:
    """The statement with each name replaced by its buffer and offset in ``memory``, and sizes by numbers."""
    if isinstance(statement, (For, Scope)):
        return replace(statement, body=tuple(_placed(s, memory, sizes) for s in statement.body))
    if not isinstance(statement, (Load, Store)):
        return statement
    buffer, start = memory.get(statement.buffer.name, (statement.buffer, ZERO))
    placed = replace(statement, buffer=buffer, offset=_known(statement.offset, sizes) + start)
    if isinstance(placed, Store):
        return placed
    return replace(placed, indirect=tuple(_known_stride(term, sizes) for term in placed.indirect))


def _known_stride(term: Indirect, sizes: Mapping[str, int]) -> Indirect:
    return replace(term, stride=sizes[term.stride.name]) if isinstance(term.stride, Size) else term


def _known(where: Affine, sizes: Mapping[str, int]) -> Affine:
    """The index with sizes replaced by their numbers."""
    total = Affine(where.terms, where.constant)
    for name, factor in where.sized:
        total += factor * sizes[name]
    return total


def _end(stop: Stop, truth: str) -> Comment:
    states = "behind" if stop.whole else "in front of"
    return Comment(f"ends where {truth} is {not stop.goes_on}: the last states are those {states} that step")
