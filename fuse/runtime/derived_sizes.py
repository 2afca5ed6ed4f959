"""Sizes that operators compute from others: steps of a strided convolution, windows of a pool, every other element.

    conv1d(x [n, 16], 3 taps, stride 2, padding 1)      (n - 1) // 2 + 1 steps
    x[::2]                                              (n + 1) // 2 rows

Such a size is no polynomial in the sizes of the arguments. Its formula is the operator's own; nothing is fitted. Sizes
that were equal in all captured calls count as one size. If several operators compute it, it has several formulas, and
is known where these agree. Graphs with a size that no formula gives are captured at each size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from fuse import ops
from fuse.kernel.extents import Conditions, Extent, terms_of
from fuse.kernel.polynomials import product_of, sum_of
from fuse.kernel.recipes import bind
from fuse.runtime.resized import NodeNumbers

Shape = tuple[int, ...]
Equation = tuple[str, str]
"""A size, and an expression for it in sizes."""

MOST_FORMULAS = 16
"""Most formulas of one size."""
_TO_THE_END = 2**62
"""Least end of a slice that ends where the tensor does."""


def formulas_of(
    nodes: Iterable[NodeNumbers], conditions: Conditions, names: Sequence[str]
) -> dict[str, tuple[str, ...]] | None:
    """For each named size, its formulas as Python expressions in the sizes of ``conditions``; None if one has none.

    The numbers of ``nodes`` are extents of ``conditions``, in which the names are factors without a formula.
    """
    shapes: dict[Node, tuple[Shape, ...]] = {}
    equations: list[Equation] = []
    for one in nodes:
        shapes[one.node] = one.sizes
        op = one.node.target
        if not isinstance(op, OpOverload):
            continue  # the nodes of a region or a loop come one by one
        given = bind(op, _with_shapes(one.args, shapes), _with_shapes(one.kwargs, shapes))
        rule = _RULES.get(op._schema.name.partition("::")[2])
        made = rule(given) if rule is not None else None
        if made is None and not _named(one.sizes, names) <= _passed_on(op, one.sizes, given, names):
            return None  # the operator computes a size in a way that is unknown here
        for size, formula in zip(one.sizes[0], made, strict=True) if made is not None else ():
            if terms_of(size) != terms_of(formula):
                equation = _solved(size, formula, conditions, names)
                if equation is None:
                    return None
                equations.append(equation)
    return _in_given_sizes(list(dict.fromkeys(equations)), names)


def _passed_on(op: OpOverload, results: Sequence[Shape], given: Mapping[str, Any], names: Sequence[str]) -> set[str]:
    """The named sizes that an operator without a formula may give its results.

    Most operators only have sizes of their tensors. The numbers of some are ``forward``'s own. Others (of a slice, of
    an image's new height) PyTorch may have computed, in ``chunk`` or ``interpolate``: a named size in them may be equal
    by chance.
    """
    name = op._schema.name.partition("::")[2]
    if name.endswith("_backward") or name in _OF_NUMBERS or (name == "arange" and given.get("step", 1) == 1):
        return _named(given, names)
    tensors = list(_shapes(list(given.values())))
    same = not results or any(list(map(terms_of, results[0])) == list(map(terms_of, shape)) for shape in tensors)
    kind = ops.kind(op)
    of_tensors = kind in ("pointwise", "gemm") or (kind == "reduction" and "pool" not in name) or name in _OF_TENSORS
    return _named(tensors, names) if same or of_tensors else set()


def _shapes(given: Any) -> Iterator[Shape]:
    """The shapes among arguments in which each tensor is a tuple of shapes."""
    if isinstance(given, tuple):
        yield from given
    elif isinstance(given, list):
        for one in given:
            yield from _shapes(one)


_OF_NUMBERS = frozenset({"view", "_unsafe_view", "reshape", "expand", "full", "zeros", "ones", "empty"})
_OF_NUMBERS |= {"new_full", "new_zeros", "new_ones", "new_empty"}
"""Operators whose numbers are ``forward``'s own, or follow from the number of elements."""
_OF_TENSORS = frozenset({"select", "unbind", "squeeze", "unsqueeze", "transpose", "permute", "t", "stack"})
_OF_TENSORS |= {"gather", "index", "index_select", "embedding"}
"""Operators whose results only have sizes of their tensors."""


def _with_shapes(argument: Any, shapes: Mapping[Node, tuple[Shape, ...]]) -> Any:
    """An argument with the shapes of its results in place of each node."""
    if isinstance(argument, Node):
        return shapes[argument]
    if isinstance(argument, (tuple, list)):
        return [_with_shapes(one, shapes) for one in argument]
    if isinstance(argument, dict):
        return {name: _with_shapes(one, shapes) for name, one in argument.items()}
    return argument


def _named(numbers: Any, names: Sequence[str]) -> set[str]:
    """The named sizes of which numbers are made."""
    found: set[str] = set()

    def note(number: int) -> int:
        found.update(name for factors, _ in terms_of(number) for name in factors if name in names)
        return number

    if isinstance(numbers, Extent):
        note(numbers)
    elif isinstance(numbers, (tuple, list)):
        found.update(*(_named(one, names) for one in numbers))
    elif isinstance(numbers, dict):
        found.update(*(_named(one, names) for one in numbers.values()))
    return found


def _solved(size: int, formula: int, conditions: Conditions, names: Sequence[str]) -> Equation | None:
    """The equation ``size == formula`` solved for a named size; None if it cannot be solved.

    >>> conditions = Conditions()
    >>> n = conditions.size("n", 9)
    >>> steps = Extent(4, ((("steps()",), 1),), conditions)
    >>> _solved(steps + 1, (n + 1) // 2, conditions, ["steps()"])
    ('steps()', '((-1)+(1)*(((1)+(1)*n) // ((2))))')
    """
    unknown = [(factors[0], times) for factors, times in terms_of(size) if set(factors) & set(names)]
    if len(unknown) != 1 or ((unknown[0][0],), unknown[0][1]) not in terms_of(size) or abs(unknown[0][1]) != 1:
        return None
    ((name, times),) = unknown
    rest = tuple((factors, -c) for factors, c in terms_of(size) if factors != (name,))
    return name, conditions.python(product_of(sum_of(terms_of(formula), rest), (((), times),)))


def _in_given_sizes(equations: Sequence[Equation], names: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """The formulas of each name with all names replaced by their first formulas; None if a name has none.

    >>> _in_given_sizes([("b()", "(a()+1)"), ("a()", "(n//2)"), ("b()", "(n-3)")], ["a()", "b()"])
    {'a()': ('(n//2)',), 'b()': ('((n//2)+1)', '(n-3)')}
    """
    first: dict[str, str] = {}

    def told(expression: str) -> str:
        for name, formula in first.items():
            expression = expression.replace(name, formula)
        return expression

    for _ in names:
        for name, expression in equations:
            if name not in first and not any(other in told(expression) for other in names):
                first[name] = told(expression)
    if len(first) < len(names):
        return None
    found = {name: dict.fromkeys(told(given) for of, given in equations if of == name) for name in names}
    return {name: tuple(of) for name, of in found.items()} if max(map(len, found.values())) <= MOST_FORMULAS else None


# ---- operators ---------------------------------------------------------------------------------------------------


def _steps(size: int, taps: int, stride: int, padding: int = 0, dilation: int = 1) -> int:
    """Number of windows of so many taps in a padded size."""
    return (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1


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


def _pool(dimensions: int) -> Callable[[Mapping[str, Any]], Shape | None]:
    def pool(given: Mapping[str, Any]) -> Shape | None:
        if given["ceil_mode"]:
            return None
        (shape,) = given["self"]
        taps = _each(given["kernel_size"], dimensions)
        each = (given["stride"] or taps, given["padding"], given.get("dilation", 1))
        windows = zip(shape[-dimensions:], taps, *(_each(one, dimensions) for one in each), strict=True)
        return *shape[:-dimensions], *(_steps(*window) for window in windows)

    return pool


def _each(given: Any, dimensions: int) -> Sequence[int]:
    """One number for each dimension; a single one holds for all."""
    listed = given if isinstance(given, (tuple, list)) else (given,)
    return listed * dimensions if len(listed) == 1 else listed


def _slice(given: Mapping[str, Any]) -> Shape | None:
    """Every element, or every other one, between constant distances from the ends; or so many of the first or last."""
    (shape,), dim, step = given["self"], given["dim"], given["step"]
    start, end, size = given["start"] or 0, given["end"], shape[dim]
    to_the_end = end is None or terms_of(end) == terms_of(size) or (not isinstance(end, Extent) and end >= _TO_THE_END)
    if isinstance(start, Extent) or (isinstance(end, Extent) and not to_the_end):
        return None
    first = start if start >= 0 else size + start
    last = size if to_the_end else end if end >= 0 else size + end
    made = list(shape)
    made[dim] = _steps(last - first, 1, step)
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
    (shape,), around = given["self"], given["pad"]
    made = list(shape)
    for i in range(len(around) // 2):
        made[-1 - i] = made[-1 - i] + around[2 * i] + around[2 * i + 1]
    return tuple(made)


def _cat(given: Mapping[str, Any]) -> Shape | None:
    shapes = [shape for (shape,) in given["tensors"]]
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        return None  # empty tensors of one dimension are left out
    made = list(shapes[0])
    made[given["dim"]] = sum((shape[given["dim"]] for shape in shapes), start=0)
    return tuple(made)


_RULES: dict[str, Callable[[Mapping[str, Any]], Shape | None]] = {
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
}
"""By operator: the shape of its first result, from its arguments by name, in which a tensor is a tuple of one shape."""
