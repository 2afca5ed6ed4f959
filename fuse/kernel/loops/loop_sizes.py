"""Arguments of a loop kernel that depend on the length of the sequence: the trip count, and offsets and strides.

    x[b, t, h] of a tensor 3 x T x 16  ->  x_steps[x_first + t * x_pace + b * x_stride0 + h]

For each step input and collected output, ``first`` is the offset of the part of step 0, and ``pace`` is the distance
between parts of consecutive steps. Strides are arguments from the first gap in memory on: with the batch in front of
time, ``x_stride0`` is ``16 * T``. Smaller strides are constants in the source, so that one source serves all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fuse.graph.loop import LoopSpec, StepInput
from fuse.kernel.arithmetic.extents import is_one
from fuse.kernel.arithmetic.index import Size, Stride


def strides_in(value: Tensor, name: str, without: int | None = None) -> tuple[Stride, ...]:
    """The strides of a tensor without dimension ``without``; those from the first gap in memory on as sizes.

    >>> import torch
    >>> [str(s) for s in strides_in(torch.empty(3, 8, 16), "x", without=1)]
    ['x_stride0', '1']
    >>> strides_in(torch.empty(3, 8, 16), "w"), strides_in(torch.empty(16, 8).t(), "w")
    ((128, 16, 1), (1, 8))
    """
    kept = [d for d in range(value.dim()) if d != without]
    found: dict[int, Stride] = {}
    dense, gap = 1, False
    for number, d in sorted(enumerate(kept), key=lambda item: (value.stride(item[1]), item[0])):
        size, stride = value.shape[d], value.stride(d)
        if is_one(size) or stride == 0:
            found[number] = min(stride, 1)  # the only index is 0, or all elements are the same
            continue
        gap = gap or stride != dense
        found[number] = Size(f"{name}_stride{number}", stride) if gap else stride
        dense = stride * size
    return tuple(found[number] for number in range(len(kept)))


def first_of(name: str, read: StepInput, operand: Tensor) -> Size:
    """The offset, in elements, of the part of a tensor that step 0 reads."""
    return Size(f"{name}_first", read.start * operand.stride(read.dim))


def pace_of(name: str, steps: int, stride: int) -> Size:
    """The distance, in elements, between the parts of a tensor that two consecutive steps read or write."""
    return Size(f"{name}_pace", steps * stride)


def result_sizes(name: str, spec: LoopSpec, result: Tensor) -> list[Size]:
    """The sizes of a collected output: the offset of step 0's part, if it is not 0, and the pace."""
    if not spec.backwards:
        return [pace_of(name, 1, result.stride(0))]
    last = (spec.trip_count - 1) * result.stride(0)
    return [Size(f"{name}_first", last), pace_of(name, -1, result.stride(0))]


def sizes_of(
    spec: LoopSpec,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    names: Sequence[str],
    result_names: Sequence[str],
) -> tuple[Size, ...]:
    """All sizes of a loop in the order of the kernel's arguments; the trip count comes first."""
    found = [Size("steps", spec.trip_count)]
    last_read = spec.carries + len(spec.step_inputs)
    for position, (operand, name) in enumerate(zip(operands, names, strict=True)):
        dim = None
        if spec.carries <= position < last_read:
            read = spec.step_inputs[position - spec.carries]
            dim = read.dim
            found += [first_of(name, read, operand), pace_of(name, read.step, operand.stride(dim))]
        elif position < spec.carries:
            name = f"{name}_start"
        found += [s for s in strides_in(operand, name, dim) if isinstance(s, Size)]
    for number, (result, name) in enumerate(zip(results, result_names, strict=True)):
        if number < spec.carries:
            found += [s for s in strides_in(result, f"{names[number]}_last") if isinstance(s, Size)]
        else:
            found += result_sizes(name, spec, result)
            found += [s for s in strides_in(result, name, 0) if isinstance(s, Size)]
    return tuple(found)
