"""One kernel for all calls of a region, where calls differ in sizes.

    add [5, 64], tanh [5, 64]      seen before
    add [7, 64], tanh [7, 64]      lowered now       ->      add [n, 64], tanh [n, 64]  while  n >= 2
    add [9, 64], tanh [9, 64]      is the same kernel, told n = 9

A region is *spelled* as a text without its numbers, and the numbers. Where an equal text came with other numbers
before, those that differ are written down as polynomials in the sizes that are known to vary, and the region is lowered
with extents (:mod:`fuse.kernel.extents`) in their place. The kernel then serves every call with this text whose other
numbers are equal, whose polynomials hold, and whose sizes meet the conditions that were noted: all of it is checked for
each call, nothing is assumed of sizes that were not seen.

The caller says which calls vary in sizes (:func:`lowering_for`). Regions of one call, too, may have one text and other
numbers, as those of several layers: each is compared with that in its place in other calls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fuse.kernel.extents import LEAST, TELLING, Conditions, Real, Terms, plain, product_of

Made = TypeVar("Made")

LARGEST_REFERENCES = 8
"""Calls that are remembered of one text."""
LARGEST_FAMILIES = 8
"""Kernels for varying sizes of one text; beyond, each call has its own, as without."""

Numbers = tuple[Any, ...]
"""Whole numbers, and floats of arguments."""


@dataclass(frozen=True)
class Call:
    """A call whose regions are lowered: its sizes that vary from call to call (None where none are known to), and the
    numbers of each text so far."""

    sizes: frozenset[int] | None
    numbers: dict[str, list[Numbers]] = field(default_factory=dict)

    def place(self, text: str, numbers: Numbers) -> int:
        """Which of the regions with this text these numbers are of: several layers may have regions alike."""
        found = self.numbers.setdefault(text, [])
        if numbers not in found:
            found.append(numbers)
        return found.index(numbers)


_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


@contextlib.contextmanager
def lowering_for(sizes: frozenset[int] | None) -> Iterator[None]:
    """Regions that are lowered inside are those of one call.

    ``sizes`` are those that vary from call to call. Where there are some, regions get kernels for all sizes, if they
    can; where none is larger than one, only kernels that are there. With None, each gets its own.
    """
    token = _CALL.set(Call(sizes))
    try:
        yield
    finally:
        _CALL.reset(token)


def call_at_hand() -> Call | None:
    """The call whose regions are lowered; None where nobody said so."""
    return _CALL.get()


# ---- texts and numbers -----------------------------------------------------------------------------------------------


def spelled(
    region: GraphModule, name_of: Callable[[Node], str], beside: Any = (), reals: bool = False
) -> tuple[str, Numbers]:
    """A region, and the tensors and numbers ``beside`` it, as a text without whole numbers, and these in order.

    With ``reals``, without the floats among the arguments, too.
    """
    numbers: list[Any] = []

    def take(number: Any) -> Any:
        numbers.append(number)
        return number

    lines = []
    places = {node: place for place, node in enumerate(region.graph.nodes)}
    for node in region.graph.nodes:
        args = [_text_of(argument, places, varies, reals) for argument, varies in _arguments(node)]
        for argument, varies in _arguments(node):
            _mapped(argument, take if varies else _itself, reals=reals)
        layouts = [_layout_text(value) for value in _parts(node.meta.get("val"))]
        for value in _parts(node.meta.get("val")):
            _sized(value, take)
        source = node.meta.get("source", "")
        lines.append(
            f"{node.op} {name_of(node)} {node.target if node.op != 'placeholder' else ''} {args} {layouts} {source}"
        )
    lines.append(_text_of(beside, places))
    _mapped(beside, take)
    return "\n".join(lines), tuple(numbers)


def with_numbers(
    region: GraphModule, numbers: Numbers, beside: Any = (), reals: bool = False
) -> tuple[GraphModule, Any]:
    """A copy of a region, and of what is ``beside`` it, with other numbers; tensors in them have no memory."""
    rest = iter(numbers)

    def take(_: Any) -> Any:
        return next(rest)

    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in region.graph.nodes:
        given = [_mapped(argument, take if varies else _itself, copies, reals) for argument, varies in _arguments(node)]
        args, kwargs = tuple(given[: len(node.args)]), dict(zip(node.kwargs, given[len(node.args) :], strict=True))
        made = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        made.meta = dict(node.meta)
        if "val" in node.meta:
            value = node.meta["val"]
            parts = [_sized(part, take) for part in _parts(value)]
            made.meta["val"] = type(value)(parts) if isinstance(value, (tuple, list)) else parts[0]
        copies[node] = made
    return GraphModule(torch.nn.Module(), graph), _mapped(beside, take)


def _arguments(node: Node) -> list[tuple[Any, bool]]:
    """The arguments of a node, each with whether its whole numbers may be sizes: a dimension, say, is none."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return [(argument, node.op == "output") for argument in (*node.args, *node.kwargs.values())]
    sizes = _takes_sizes(node.target)
    by_place = zip(node.args, sizes.values(), strict=False)
    return [*by_place, *((argument, sizes[name]) for name, argument in node.kwargs.items())]


@cache
def _takes_sizes(op: torch._ops.OpOverload) -> dict[str, bool]:
    """Arguments of an operator by name: False for whole numbers that its schema does not let be symbolic.

    >>> _takes_sizes(torch.ops.aten.select.int)
    {'self': True, 'dim': False, 'index': True}
    """
    return {argument.name: _innermost(argument.real_type) != "IntType" for argument in op._schema.arguments}


def _innermost(kind: Any) -> str:
    while hasattr(kind, "getElementType"):  # of an option or a list
        kind = kind.getElementType()
    name: str = kind.kind()
    return name


def _itself(number: Any) -> Any:
    return number


def _is_real(argument: Any) -> bool:
    """Whether an argument is a float of which all are written alike: no zero, whose sign tells, and no infinity."""
    return type(argument) is float and math.isfinite(argument) and argument != 0


def _parts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _mapped(
    argument: Any, take: Callable[[Any], Any], nodes: dict[Node, Node] | None = None, reals: bool = False
) -> Any:
    """An argument with every number replaced by what ``take`` gives for it, from left to right."""
    if type(argument) is int or (reals and _is_real(argument)):
        return take(argument)
    if isinstance(argument, Tensor):
        return _sized(argument, take)
    if isinstance(argument, Node):
        return nodes[argument] if nodes is not None else argument
    if isinstance(argument, (tuple, list)):
        return type(argument)([_mapped(item, take, nodes, reals) for item in argument])
    if isinstance(argument, dict):
        return {key: _mapped(item, take, nodes, reals) for key, item in argument.items()}
    return argument


def _text_of(argument: Any, places: dict[Node, int], varies: bool = True, reals: bool = False) -> str:
    if type(argument) is int:
        return "#" if varies else str(argument)
    if reals and varies and _is_real(argument):
        return "~"
    if isinstance(argument, Tensor):
        return _layout_text(argument)
    if isinstance(argument, Node):
        return f"%{places[argument]}"
    if isinstance(argument, (tuple, list)):
        return f"{type(argument).__name__}({', '.join(_text_of(item, places, varies, reals) for item in argument)})"
    if isinstance(argument, dict):
        return f"{{{', '.join(f'{key}: {_text_of(item, places, varies, reals)}' for key, item in argument.items())}}}"
    return repr(argument)


def _layout_text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {value.dim()} {value.device} {value.layout} {value.is_conj()} {value.is_neg()}"


def _sized(value: Any, take: Callable[[Any], Any]) -> Any:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return value  # kernels take no such tensor, whatever its size
    shape = tuple(map(take, value.shape))
    return SizedTensor(value, shape, tuple(map(take, value.stride())))


class SizedTensor(Tensor):
    """A tensor without memory, whose shape and strides may be extents."""

    _shape: tuple[int, ...]
    _strides: tuple[int, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own classes do

    @staticmethod
    def __new__(cls, like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> SizedTensor:
        made: SizedTensor = Tensor._make_wrapper_subclass(
            cls, list(map(plain, shape)), strides=list(map(plain, strides)), dtype=like.dtype, device=like.device
        )
        made._shape, made._strides = shape, strides
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @property
    def shape(self) -> Any:  # type: ignore[override]  # nobody sets it
        return self._shape

    def stride(self, dim: int | None = None) -> Any:
        return self._strides if dim is None else self._strides[dim]

    def size(self, dim: int | None = None) -> Any:
        return self._shape if dim is None else self._shape[dim]

    def numel(self) -> int:
        return math.prod(self._shape)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as it is called
        raise TypeError(f"{op} of a tensor without memory")


def with_sizes(source: str, names: Sequence[str], arguments: int, reals: Sequence[str] = ()) -> str:
    """The text of a kernel that finds its sizes behind so many arguments; those that are ``reals`` bit by bit."""
    head, opening, rest = source.partition("(char *const *args) {")
    lines = [f"    const int64_t *sizes = (const int64_t *)args[{arguments}];"]
    for number, name in enumerate(names):
        kind, value = (
            ("double", f"((const double *)sizes)[{number}]") if name in reals else ("int64_t", f"sizes[{number}]")
        )
        lines.append(f"    const {kind} {name} = {value};")
    return "\n".join([f"{head}{opening}", *lines, rest.removeprefix("\n")])


# ---- relations -------------------------------------------------------------------------------------------------------

Relation = tuple[int | Terms, ...]
"""What each number of a text is: always the same, or a polynomial in the sizes."""


def relation_of(
    now: Numbers, references: Sequence[Numbers], apart: frozenset[int] = frozenset()
) -> tuple[tuple[int, ...], Relation] | None:
    """How the numbers of a text follow from sizes: where each size stands, and what every number is.

    The sizes are the smallest numbers that differ and follow from no others: as a multiple of one, of two of them, or
    one and a few; numbers ``apart`` follow from none. None where there is nothing to relate to.

    >>> relation_of((7, 3, 448, 8), [(5, 3, 320, 6)])
    ((0,), (((('n0',), 1),), 3, ((('n0',), 64),), (((), 1), (('n0',), 1))))
    """
    alike = [o for o in references if all(map(_are_alike, now, o))]
    columns = list(zip(now, *alike, strict=True))
    vary = {place for place, column in enumerate(columns) if len(set(column)) > 1}
    if not vary:
        return None
    sizes: list[Column] = []
    factors: list[tuple[Column, Terms]] = []  # sizes, and those that are a few more or less than one
    known: dict[Column, Terms] = {}
    whole = {columns[place] for place in vary if type(columns[place][0]) is int}
    for column in sorted(whole, key=lambda c: (max(map(abs, c)), c)):
        terms = None if column[0] in apart else _multiple(column, factors)
        if terms is None:
            shift = None if column[0] in apart else _shift(column, sizes)
            if shift is None:
                terms = (((f"n{len(sizes)}",), 1),)
                sizes.append(column)
            else:
                terms = shift
            factors.append((column, terms))
        known[column] = terms
    for place in sorted(vary):
        column = columns[place]
        if column not in known:  # floats, which follow from nothing
            known[column] = (((f"n{len(sizes)}",), 1),)
            sizes.append(column)
    places = tuple(columns.index(size) for size in sizes)
    return places, tuple(known[column] if place in vary else column[0] for place, column in enumerate(columns))


def _are_alike(a: Any, b: Any) -> bool:
    """Whether two numbers may be one that varies: floats, and sizes that tell."""
    return a == b or isinstance(a, float) or min(a, b) >= TELLING


Column = tuple[Any, ...]
"""One number of a text in several calls."""


def _multiple(column: Column, factors: Sequence[tuple[Column, Terms]]) -> Terms | None:
    """A number as a multiple of a factor, or of two."""
    for i, (one, terms) in enumerate(factors):
        for two, more in [((1,) * len(one), (((), 1),)), *factors[: i + 1]]:
            times = column[0] // ((one[0] * two[0]) or 1)
            if times and all(c == times * a * b for c, a, b in zip(column, one, two, strict=True)):
                return product_of(terms, more, (((), times),))
    return None


def _shift(column: Column, sizes: Sequence[Column]) -> Terms | None:
    """A number as a size and a few more or less."""
    for i, one in enumerate(sizes):
        shift = column[0] - one[0]
        if all(c == a + shift for c, a in zip(column, one, strict=True)):
            return (((), shift), ((f"n{i}",), 1))
    return None


def lifted(relation: Relation, sizes: Numbers, usual: Numbers) -> tuple[Conditions, Numbers]:
    """The numbers of the call with these sizes, those that vary as extents."""
    conditions = Conditions()
    values: dict[str, Any] = {}
    for i, (size, most) in enumerate(zip(sizes, usual, strict=True)):
        name = f"n{i}"
        values[name] = conditions.real(name, size) if isinstance(size, float) else conditions.size(name, size, most)
    numbers: list[Any] = []
    for number in relation:
        if isinstance(number, tuple) and isinstance(told := values[number[-1][0][-1]], Real):
            numbers.append(told)
        elif isinstance(number, tuple):
            terms = (math.prod((values[f] for f in factors), start=c) for factors, c in number)
            numbers.append(sum(terms, start=0))
        else:
            numbers.append(number)
    return conditions, tuple(numbers)


# ---- kernels ---------------------------------------------------------------------------------------------------------


Lower = Callable[[Numbers, Conditions], Made | None]


@dataclass(frozen=True)
class Family(Generic[Made]):
    """What was made for all calls of a text whose numbers follow from sizes alike.

    ``numbers`` computes the numbers of a call from its sizes, ``met`` says whether they meet the conditions.
    """

    made: Made
    conditions: Conditions
    places: tuple[int, ...]
    numbers: Callable[..., Numbers]
    met: Callable[..., bool]

    def sizes(self, numbers: Numbers) -> Numbers | None:
        """The sizes of a call with these numbers; None where it is no member."""
        sizes = tuple(numbers[place] for place in self.places)
        return sizes if self.numbers(*sizes) == numbers and self.met(*sizes) else None


@dataclass
class Text(Generic[Made]):
    """What is known of regions with one text: the numbers of some, and families. ``failures`` bounds the attempts."""

    references: dict[int, list[Numbers]] = field(default_factory=dict)
    families: list[Family[Made]] = field(default_factory=list)
    failures: int = 0

    def remember(self, place: int, numbers: Numbers) -> None:
        """Keep the numbers of the region in this place of a call."""
        known = self.references.setdefault(place, [])
        if numbers not in known:
            self.references[place] = [*known[-LARGEST_REFERENCES + 1 :], numbers]

    def member(
        self, numbers: Numbers, place: int, apart: frozenset[int], lower: Lower[Made]
    ) -> tuple[Family[Made], Numbers] | None:
        """The family that a call with these numbers belongs to, and its sizes; a new one if need be and possible.

        ``lower`` makes what serves a region with these numbers, extents among them, or None.
        """
        others = self.references.get(place, [])
        for family in self.families:
            if (sizes := family.sizes(numbers)) is not None:
                return family, sizes
        if not apart or len(self.families) + self.failures >= LARGEST_FAMILIES:
            return None
        found = relation_of(numbers, others, apart)
        if found is None:
            return None
        places, relation = found
        made = _family(numbers, others, places, relation, lower)
        if made is None:
            self.failures += 1
            return None
        self.families.insert(0, made)
        return made, tuple(numbers[place] for place in places)


def _family(
    numbers: Numbers,
    others: Sequence[Numbers],
    places: tuple[int, ...],
    relation: Relation,
    lower: Lower[Made],
) -> Family[Made] | None:
    """What serves a region at all sizes, lowered for those of this call, and once more for others.

    None where that gives another kernel: something was not noted. None, too, where no other sizes are known that meet
    the conditions, so that nothing would be gained.
    """
    now = tuple(numbers[place] for place in places)
    conditions, values = lifted(relation, now, now)
    made = lower(values, conditions)
    if made is None:
        return None
    expected = ", ".join(conditions.python(n) if isinstance(n, tuple) else repr(n) for n in relation)
    family = Family(made, conditions, places, conditions.function(f"({expected},)"), conditions.met())
    assert family.sizes(numbers) is not None
    elsewhere = _elsewhere(family, now, others)
    if elsewhere is None:
        return None
    if not _is_again(family, relation, elsewhere, now, lower):
        return None
    ones = tuple(n if isinstance(n, float) else 1 for n in now)
    if family.met(*ones) and not _is_again(family, relation, ones, now, lower):
        whole = [name for name, n in zip(conditions.sizes, now, strict=True) if type(n) is int]
        conditions.noted |= {f"{name} >= {TELLING}": True for name in whole}
        return replace(family, met=conditions.met())
    return family


def _is_again(family: Family[Made], relation: Relation, sizes: Numbers, usual: Numbers, lower: Lower[Made]) -> bool:
    """Whether the same is made at other sizes."""
    again, values = lifted(relation, sizes, usual)
    try:
        return lower(values, again) == family.made
    except Exception:  # sizes that were made up may contradict each other
        return False


def _elsewhere(family: Family[Made], now: Numbers, others: Sequence[Numbers]) -> Numbers | None:
    """The sizes, of other calls or made up, that the family serves and in which most differ from those ``now``."""
    seen = [sizes for other in others if (sizes := family.sizes(other)) is not None]
    together = [tuple(change(n) for n in now) for change in _CHANGES]
    apart = [(*now[:i], change(n), *now[i + 1 :]) for i, n in enumerate(now) for change in _CHANGES]
    whole = [place for place, n in enumerate(now) if type(n) is int]
    made_up = [sizes for sizes in (*together, *apart) if all(sizes[i] >= LEAST for i in whole) and family.met(*sizes)]
    differ = [sum(a != b for a, b in zip(sizes, now, strict=True)) for sizes in (*seen, *made_up)]
    return max(zip(differ, (*seen, *made_up), strict=True), key=lambda found: found[0], default=(0, None))[1]


_CHANGES: tuple[Callable[[int], int], ...] = (lambda n: n + 1, lambda n: 2 * n, lambda n: 3 * n, lambda n: n - 1)
