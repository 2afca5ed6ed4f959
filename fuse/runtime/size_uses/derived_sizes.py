"""Sizes that are computed from others: steps of a strided convolution, windows of a pool, a half of the tokens.

    conv1d(x [n, 16], 3 taps, stride 2, padding 1)      (n - 1) // 2 + 1 steps
    x[::2]                                              (n + 1) // 2 rows
    pad(x, -n % 8)                                      n + -n % 8 rows

Such a size is no polynomial in the sizes of the arguments. Its formula is the operator's own, or that of a number which
``forward`` computes (:mod:`fuse.runtime.generalising.generalised`); nothing is fitted. Sizes that were equal in all
captured calls count as one size. If several operators compute it, it has several formulas, and is known where these
agree. Graphs with a size that no formula gives are captured at each size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from fuse import ops
from fuse.kernel.arithmetic.extents import Conditions, Extent, terms_of
from fuse.kernel.arithmetic.polynomials import Terms, sum_of
from fuse.kernel.recipes.registry import bind
from fuse.kernel.sizes.shape_rules import RULES, Shape, has_sizes_of_tensors, name_of, shapes_in
from fuse.runtime.resizing.resized import NodeNumbers

Equation = tuple[str, str]
"""A size, and an expression for it in sizes."""

MOST_FORMULAS = 16
"""Most formulas of one size."""
_SHAPED = frozenset({"view", "_unsafe_view", "reshape", "expand", "full", "zeros", "ones", "empty"})
_SHAPED |= {"new_full", "new_zeros", "new_ones", "new_empty"}
"""Operators whose results have the sizes that ``forward`` says, or one that follows from the number of elements."""
_PLACES = frozenset({"select", "select_scatter", "slice_scatter", "roll"})
"""Operators with places that ``forward`` says."""


@dataclass(frozen=True)
class Equations:
    """Equations for named sizes, which operators give.

    ``own``: they only hold if sizes that operators are told are ``forward``'s own numbers, and not computed in C++.
    ``loose``: named sizes that are also used in another way, so that no number of ``forward`` tells them.
    """

    of_operators: tuple[Equation, ...]
    own: bool
    loose: frozenset[str]


def equations_of(nodes: Iterable[NodeNumbers], conditions: Conditions, names: Sequence[str]) -> Equations | None:
    """The equations that operators give for named sizes, in the sizes of ``conditions``; None if an operator computes
    a size in a way that is unknown.

    The numbers of ``nodes`` are extents of ``conditions``, in which the names are factors without a formula.
    """
    shapes: dict[Node, tuple[Shape, ...]] = {}
    equations: dict[Equation, None] = {}
    own, loose = False, set[str]()
    for one in nodes:
        loose |= _named(one.counts, names)
        shapes[one.node] = one.sizes
        op = one.node.target
        if not isinstance(op, OpOverload):
            continue  # the nodes of a region or a loop come one by one
        given = bind(op, _with_shapes(one.args, shapes), _with_shapes(one.kwargs, shapes))
        name, told = name_of(op), _told(given, names)
        if not (name in RULES or name in _PLACES or _is_shaped(name, given) or ops.is_pointwise(op)):
            loose |= told
        own = own or (bool(told) and (name == "slice" or name.startswith("upsample")))
        made = RULES[name](given) if name in RULES else None
        if made is None and not _named(one.sizes, names) <= _passed_on(op, one.sizes, given, names):
            return None
        for size, formula in zip(one.sizes[0], made, strict=True) if made is not None else ():
            if terms_of(size) != terms_of(formula):
                found = solved(terms_of(size), terms_of(formula), conditions, names)
                if not found:
                    return None
                equations |= dict.fromkeys(found)
    return Equations(tuple(equations), own, frozenset(loose))


def _passed_on(op: OpOverload, results: Sequence[Shape], given: Mapping[str, Any], names: Sequence[str]) -> set[str]:
    """The named sizes that an operator without a formula may give its results.

    Most operators only have sizes of their tensors. The numbers of some are ``forward``'s own. Others PyTorch may have
    computed: a named size in them may be equal by chance.
    """
    if _is_shaped(name_of(op), given):
        return _named(given, names)
    tensors = list(shapes_in(list(given.values())))
    same = not results or any(list(map(terms_of, results[0])) == list(map(terms_of, shape)) for shape in tensors)
    return _named(tensors, names) if same or has_sizes_of_tensors(op) else set()


def _is_shaped(name: str, given: Mapping[str, Any]) -> bool:
    """Whether an operator is told the sizes of its result."""
    return name.endswith("_backward") or name in _SHAPED or (name == "arange" and given.get("step", 1) == 1)


def _told(given: Any, names: Sequence[str]) -> set[str]:
    """The named sizes among an operator's arguments, those of its tensors left out."""
    if isinstance(given, tuple):
        return set()
    if isinstance(given, (list, dict)):
        return set[str]().union(*(_told(one, names) for one in (given.values() if isinstance(given, dict) else given)))
    return _named(given, names)


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


def solved(one: Terms, other: Terms, conditions: Conditions, names: Sequence[str]) -> list[Equation]:
    """The equation ``one == other`` solved for a named size; none if it cannot be solved.

    Where the size is a quotient, it is rounded in both ways: the formulas agree where the quotient is exact.

    >>> conditions = Conditions(("n",))
    >>> steps = ((("steps()",), 1),)
    >>> solved((((), 1), *steps), ((("n",), 1),), conditions, ["steps()"])
    [('steps()', '((-1)+(1)*n)')]
    >>> solved(((("steps()",), 2),), ((("n",), 1),), conditions, ["steps()"])
    [('steps()', '(((1)*n) // 2)'), ('steps()', '(-(((-1)*n) // 2))')]
    """
    apart = sum_of(one, tuple((factors, -times) for factors, times in other))
    for (*_, name), times in (term for term in apart if term[0]):
        if name in names and [factors for factors, _ in apart if name in factors] == [(name,)]:
            sign = -1 if times > 0 else 1
            rest = tuple((factors, sign * c) for factors, c in apart if factors != (name,))
            formula = conditions.python(rest)
            if abs(times) == 1:
                return [(name, formula)]
            opposite = conditions.python(tuple((factors, -c) for factors, c in rest))
            return [(name, f"({formula} // {abs(times)})"), (name, f"(-({opposite} // {abs(times)}))")]
    return []


def in_given_sizes(equations: Sequence[Equation], names: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """The formulas of each name with all names replaced by their first formulas, none for a name that has none; None if
    one has too many.

    >>> equations = [("b()", "(a()+1)"), ("a()", "(n//2)"), ("b()", "(n-3)"), ("c()", "(d()+1)")]
    >>> in_given_sizes(equations, ["a()", "b()", "c()", "d()"])
    {'a()': ('(n//2)',), 'b()': ('((n//2)+1)', '(n-3)'), 'c()': (), 'd()': ()}
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
    found = {name: tuple(dict.fromkeys(told(given) for of, given in equations if of == name)) for name in names}
    found = {name: of if name in first else () for name, of in found.items()}
    unknown = [name for name in names if name not in first]
    found = {name: tuple(one for one in of if not any(other in one for other in unknown)) for name, of in found.items()}
    return found if max(map(len, found.values())) <= MOST_FORMULAS else None
