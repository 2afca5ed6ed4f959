"""Shapes of results as functions of an operator's arguments, whose numbers may be extents.

conv1d(x [n, 16], 3 taps, stride 2, padding 1)      (n - 1) // 2 + 1 steps
max_pool1d(x [n, 16], 2 taps, rounding up)          the smaller one of (n + 1) // 2 and (n - 1) // 2 + 1
x[a:b]                                              b - a rows
upsample_nearest1d(x [n, 16], scale 0.5)            n // 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch._ops import OpOverload

from fuse import ops
from fuse.kernel.arithmetic.extents import smaller

Shape = tuple[Any, ...]
Rule = Callable[[Mapping[str, Any]], Shape | None]
"""The shape of an operator's first result, from its arguments by name, in which a tensor is a tuple of one shape; None
if it has no formula."""

MOST_HALVINGS = 12
"""Exponent of the largest power of two that may be the denominator of a factor."""
_TO_THE_END = 2**62
"""Least end of a slice that ends where the tensor does."""
_OF_TENSORS = frozenset({"select", "unbind", "squeeze", "unsqueeze", "transpose", "permute", "t", "stack"})
_OF_TENSORS |= {"gather", "index", "index_select", "embedding"}
"""Operators whose results only have sizes of their tensors."""


def name_of(op: OpOverload) -> str:
    """The name of an operator without its namespace and its overload."""
    return op._schema.name.partition("::")[2]


def has_sizes_of_tensors(op: OpOverload) -> bool:
    """Whether the results of an operator only have sizes of its tensors."""
    kind, name = ops.kind(op), name_of(op)
    return kind in ("pointwise", "gemm") or (kind == "reduction" and "pool" not in name) or name in _OF_TENSORS


def shapes_in(given: Any) -> Iterator[Shape]:
    """The shapes among arguments in which each tensor is a tuple of shapes.

    >>> list(shapes_in([((5, 3),), [((5,),), 7]]))
    [(5, 3), (5,)]
    """
    if isinstance(given, tuple):
        yield from given
    elif isinstance(given, list):
        for one in given:
            yield from shapes_in(one)


def _steps(size: int, taps: int, stride: int, padding: int = 0, dilation: int = 1, rounds_up: bool = False) -> int:
    """Number of windows of so many taps in a padded size; if it ``rounds_up``, the last one may end outside, but begins
    before the padding at the end.

    >>> _steps(7, 2, 2), _steps(7, 2, 2, rounds_up=True), _steps(7, 3, 3, 1, rounds_up=True)
    (3, 4, 3)
    """
    room = size + 2 * padding - dilation * (taps - 1) - 1
    if rounds_up:
        return smaller((room + stride - 1) // stride, (size + padding - 1) // stride) + 1
    return room // stride + 1


def _convolution(given: Mapping[str, Any]) -> Shape:
    ((batch, _, *space),), (weight,) = given["input"], given["weight"]
    taps = weight[2:]
    each = [_each(given[name], len(space)) for name in ("stride", "padding", "dilation", "output_padding")]
    if given["transposed"]:
        parts = zip(space, taps, *each, strict=True)
        made = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, d, o in parts]
        return batch, weight[1] * given["groups"], *made
    made = [_steps(n, k, s, p, d) for n, k, s, p, d in zip(space, taps, *each[:3], strict=True)]
    return batch, weight[0], *made


def _pool(dimensions: int) -> Rule:
    def pool(given: Mapping[str, Any]) -> Shape:
        (shape,) = given["self"]
        taps = _each(given["kernel_size"], dimensions)
        each = (given["stride"] or taps, given["padding"], given.get("dilation", 1), given["ceil_mode"])
        windows = zip(shape[-dimensions:], taps, *(_each(one, dimensions) for one in each), strict=True)
        return *shape[:-dimensions], *(_steps(n, k, s, p, d, up) for n, k, s, p, d, up in windows)

    return pool


def _each(given: Any, dimensions: int) -> Sequence[int]:
    """One number for each dimension; a single one holds for all."""
    listed = given if isinstance(given, (tuple, list)) else (given,)
    return listed * dimensions if len(listed) == 1 else listed


def _slice(given: Mapping[str, Any]) -> Shape:
    """Every element, or every other one, between two numbers. Which of these and the size is larger is a condition."""
    (shape,), dim, step = given["self"], given["dim"], given["step"]
    start, end, size = 0 if given["start"] is None else given["start"], given["end"], shape[dim]
    first = start if start >= 0 else size + start
    last = size if end is None or end >= _TO_THE_END else end if end >= 0 else size + end
    made = list(shape)
    made[dim] = _steps((size if last > size else last) - (0 if first < 0 else first), 1, step)
    return tuple(made)


def _unfold(given: Mapping[str, Any]) -> Shape:
    (shape,), dim = given["self"], given["dimension"]
    made = list(shape)
    made[dim] = _steps(shape[dim], given["size"], given["step"])
    return *made, given["size"]


def _im2col(given: Mapping[str, Any]) -> Shape | None:
    (shape,), taps = given["self"], given["kernel_size"]
    if len(shape) != 4:
        return None
    batch, channels, *space = shape
    windows = zip(space, taps, given["stride"], given["padding"], given["dilation"], strict=True)
    rows, columns = (_steps(*window) for window in windows)
    return batch, channels * taps[0] * taps[1], rows * columns


def _pad(given: Mapping[str, Any]) -> Shape:
    """A size is unknown, None, if it or a width beside it is."""
    (shape,), around = given["self"], given["pad"]
    made = list(shape)
    for i in range(len(around) // 2):
        parts = (made[-1 - i], around[2 * i], around[2 * i + 1])
        made[-1 - i] = None if any(one is None for one in parts) else sum(parts)
    return tuple(made)


def _cat(given: Mapping[str, Any]) -> Shape | None:
    shapes = [shape for (shape,) in given["tensors"]]
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        return None  # empty tensors of one dimension are left out
    made = list(shapes[0])
    made[given["dim"]] = sum((shape[given["dim"]] for shape in shapes), start=0)
    return tuple(made)


def _upsample(dimensions: int) -> Rule:
    """So many pixels as ``forward`` says, or the number of pixels times a factor, rounded down."""

    def upsample(given: Mapping[str, Any]) -> Shape | None:
        (shape,), sizes = given["self"], given["output_size"]
        factors = [given[name] for name in ("scales", "scales_d", "scales_h", "scales_w") if name in given]
        made = list(map(_scaled, shape[-dimensions:], factors, sizes))
        return None if None in made else (*shape[:-dimensions], *made)

    return upsample


def _scaled(size: int, factor: float | None, given: int) -> int | None:
    """A size times a factor, rounded down; None if the product of floats may be another one.

    >>> _scaled(9, 0.5, 4), _scaled(9, 1 / 3, 3), _scaled(9, None, 5)
    (4, None, 5)
    """
    if factor is None:
        return given
    times, parts = factor.as_integer_ratio()
    return size * times // parts if parts <= 1 << MOST_HALVINGS and times <= 1 << 2 * MOST_HALVINGS else None


RULES: dict[str, Rule] = {
    "convolution": _convolution,
    "max_pool2d_with_indices": _pool(2),
    "max_pool3d_with_indices": _pool(3),
    "avg_pool1d": _pool(1),
    "avg_pool2d": _pool(2),
    "avg_pool3d": _pool(3),
    "slice": _slice,
    "unfold": _unfold,
    "im2col": _im2col,
    "constant_pad_nd": _pad,
    "cat": _cat,
    "upsample_nearest1d": _upsample(1),
    "upsample_nearest2d": _upsample(2),
    "upsample_nearest3d": _upsample(3),
    "upsample_linear1d": _upsample(1),
    "upsample_bilinear2d": _upsample(2),
    "upsample_bicubic2d": _upsample(2),
    "upsample_trilinear3d": _upsample(3),
}
"""By the name of an operator."""
