"""Index arithmetic: affine expressions over loop variables, and their transformation by a reshape.

A loop variable is an *atom*. The index of every tensor dimension is ``sum(coefficient * atom) + constant``. A reshape
converts indices through the flat index:

    view [6] -> [2, 3]      flat = 3*i + j, which is the index of the dimension of extent 6
    view [2, 3] -> [6]      i = n // 3, j = n % 3: affine only if n is written as 3*hi + lo

In the second case, ``SplitNeeded`` makes the schedule split the loop over ``n`` into two loops. Then the indices are
affine again, so that no kernel divides.

A stride may be a ``Size``, a number known in the call only. Offsets then have named coefficients too:
``2 * j + i * x_stride0``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fuse.graph.strides import contiguous_strides
from fuse.kernel.arithmetic.extents import alike, always_equal, common_divisor, estimate, is_multiple, is_one, reaches


@dataclass(frozen=True)
class Size:
    """A number known in the call only: its name in kernels, and its ``value`` in the current call.

    Sizes with one name compare equal whatever their values, so that generated code cannot depend on the values.
    """

    name: str
    value: int = field(compare=False)

    def __str__(self) -> str:
        return self.name


Stride = int | Size


@dataclass(frozen=True)
class Affine:
    """``constant + sum(coefficient * atom) + sum(size * index)``.

    ``terms`` has the non-zero coefficients, sorted by atom; ``sized`` has the index that each size multiplies.

    >>> i, j = Affine.of("i"), Affine.of("j")
    >>> str(i * 4 + j + 1)
    '4 * i + j + 1'
    >>> str(j + (i * 2 + 1).times(Size("stride", 100)))
    'j + (2 * i + 1) * stride'
    """

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0
    sized: tuple[tuple[str, Affine], ...] = ()

    @staticmethod
    def of(atom: str) -> Affine:
        return Affine(((atom, 1),))

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.terms, self.constant + other, self.sized)
        if self.sized or other.sized:
            factors = dict(self.sized)
            for name, factor in other.sized:
                factors[name] = factors.get(name, ZERO) + factor
            plain = Affine(self.terms, self.constant) + Affine(other.terms, other.constant)
            return Affine(plain.terms, plain.constant, tuple(sorted(i for i in factors.items() if i[1] != ZERO)))
        if not other.terms:
            return Affine(self.terms, self.constant + other.constant)
        if not self.terms:
            return Affine(other.terms, self.constant + other.constant)
        merged = dict(self.terms)
        for atom, coefficient in other.terms:
            merged[atom] = merged.get(atom, 0) + coefficient
        return Affine(tuple(sorted((a, c) for a, c in merged.items() if c)), self.constant + other.constant)

    def __mul__(self, factor: int) -> Affine:
        if factor == 0:
            return ZERO
        sized = tuple((name, f * factor) for name, f in self.sized)
        return Affine(tuple((a, c * factor) for a, c in self.terms), self.constant * factor, sized)

    def times(self, stride: Stride) -> Affine:
        """This index times ``stride``; a ``Size`` may multiply only an index without sizes."""
        if not isinstance(stride, Size):
            return self * stride
        assert not self.sized
        return Affine(sized=((stride.name, self),)) if self != ZERO else ZERO

    def atoms(self) -> tuple[str, ...]:
        return (*(atom for atom, _ in self.terms), *(atom for _, factor in self.sized for atom in factor.atoms()))

    def coefficient(self, atom: str) -> int:
        """The coefficient of ``atom`` among ``terms``."""
        return dict(self.terms).get(atom, 0)

    def step(self, atom: str) -> Affine:
        """The coefficient of ``atom`` with sizes among its factors, as an index without atoms.

        >>> str((Affine.of("i") * 2 + 1).times(Size("stride", 100)).step("i"))
        '2 * stride'
        """
        factors = ((name, Affine((), factor.coefficient(atom))) for name, factor in self.sized)
        return Affine((), self.coefficient(atom), tuple(item for item in factors if item[1] != ZERO))

    def start(self) -> Affine:
        """The value where all atoms are 0, as an index without atoms."""
        factors = ((name, Affine((), factor.constant)) for name, factor in self.sized)
        return Affine((), self.constant, tuple(item for item in factors if item[1] != ZERO))

    def without(self, atom: str) -> Affine:
        """This index with ``atom`` set to 0."""
        factors = ((name, factor.without(atom)) for name, factor in self.sized)
        terms = tuple(term for term in self.terms if term[0] != atom)
        return Affine(terms, self.constant, tuple(item for item in factors if item[1] != ZERO))

    def is_always(self, other: Affine) -> bool:
        """Whether both indices are equal for all sizes."""
        return (
            [atom for atom, _ in self.terms] == [atom for atom, _ in other.terms]
            and all(always_equal(a, b) for (_, a), (_, b) in zip(self.terms, other.terms, strict=True))
            and always_equal(self.constant, other.constant)
            and [name for name, _ in self.sized] == [name for name, _ in other.sized]
            and all(a.is_always(b) for (_, a), (_, b) in zip(self.sized, other.sized, strict=True))
        )

    def __str__(self) -> str:
        signs = {1: "", -1: "-"}
        ordered = sorted(self.terms, key=lambda term: (-abs(estimate(term[1])), estimate(term[1]) < 0))
        parts = [f"{signs[c]}{atom}" if c in signs else f"{c} * {atom}" for atom, c in ordered]
        if not always_equal(self.constant, 0) or not (parts or self.sized):
            parts.append(str(self.constant))
        parts += [_scaled(factor, name) for name, factor in self.sized]
        return " + ".join(parts).replace("+ -", "- ")


def _scaled(factor: Affine, size: str) -> str:
    if factor == Affine((), 1):
        return size
    single = len(factor.terms) + bool(factor.constant) == 1
    return f"{factor} * {size}" if single else f"({factor}) * {size}"


ZERO = Affine()
Index = tuple[Affine, ...]


class SplitNeeded(Exception):
    """The loop over ``atom`` must become an outer loop and an inner one of ``inner`` steps."""

    def __init__(self, atom: str, inner: int) -> None:
        super().__init__(f"split {atom} by {inner}")
        self.atom = atom
        self.inner = inner


class NotAffine(Exception):
    """An index is not affine in the loop variables; the message is a reason for the user."""


def offset(index: Index, strides: Sequence[Stride]) -> Affine:
    """The offset, in elements, of ``index`` in a buffer with these strides."""
    total = ZERO
    for i, stride in zip(index, strides, strict=True):
        if stride and (i.terms or not always_equal(i.constant, 0)):
            total = total + i.times(stride)
    return total


def reshape(index: Index, shape: Sequence[int], target: Sequence[int], extents: Mapping[str, int]) -> Index:
    """The index into ``target`` of the element at ``index`` in ``shape`` (both row-major, with as many elements).

    Raises:
        SplitNeeded: an atom must become two loops first.
        NotAffine: no split helps.

    >>> reshape((Affine.of("i"), Affine.of("j")), (2, 3), (6,), {"i": 2, "j": 3})[0].__str__()
    '3 * i + j'
    >>> reshape((Affine.of("i"), Affine.of("j") + Affine((), -1)), (2, 3), (6,), {"i": 2, "j": 3})[0].__str__()
    '3 * i + j - 1'
    """
    if alike(shape, target):
        return index
    own = [(i, extent) for i, extent in zip(index, shape, strict=True) if not is_one(extent)]
    asked = [extent for extent in target if not is_one(extent)]
    first = 0  # equal leading and trailing dimensions keep their index, which may lie in padding, outside of them
    while first < min(len(own), len(asked)) and always_equal(own[first][1], asked[first]):
        first += 1
    last = 0
    while last < min(len(own), len(asked)) - first and always_equal(own[-1 - last][1], asked[-1 - last]):
        last += 1
    inner = own[first : len(own) - last]
    rest = offset(tuple(i for i, _ in inner), contiguous_strides([extent for _, extent in inner]))
    outermost, *others = asked[first : len(asked) - last] or [1]
    digits = []
    for extent in reversed(others):
        rest, digit = _take_digit(rest, extent, extents)
        digits.append(digit)
    if not is_one(outermost):  # what is left, whatever it is: it may lie in padding, too
        digits.append(rest)
    kept = iter((*(i for i, _ in own[:first]), *reversed(digits), *(i for i, _ in own[len(own) - last :])))
    return tuple(ZERO if is_one(extent) else next(kept) for extent in target)


def _divides_properly(inner: int, extent: int) -> bool:
    """Whether ``inner`` is a divisor of ``extent`` other than 1 and ``extent``.

    A divisor that varies may be 1 or ``extent`` in some calls; the split is right there too.
    """
    if is_multiple(extent, inner):
        return not is_one(inner) and not always_equal(inner, extent)
    return 1 < inner < extent and extent % inner == 0


def _take_digit(flat: Affine, extent: int, extents: Mapping[str, int]) -> tuple[Affine, Affine]:
    """``divmod(flat, extent)`` for an affine ``flat``."""
    if is_one(extent):
        return flat, ZERO
    high: dict[str, int] = {}
    low: dict[str, int] = {}
    for atom, coefficient in flat.terms:
        if is_multiple(coefficient, extent):
            high[atom] = coefficient // extent
        else:
            low[atom] = coefficient
    high_constant, low_constant = divmod(flat.constant, extent)
    reach = low_constant + sum(c * (extents[a] - 1) for a, c in low.items() if c > 0)
    least = low_constant + sum(c * (extents[a] - 1) for a, c in low.items() if c < 0)
    if reaches(reach, extent) or least < 0:
        for atom, coefficient in sorted(low.items(), key=lambda item: -abs(item[1])):
            inner = extent // common_divisor(coefficient, extent)
            if _divides_properly(inner, extents[atom]):
                raise SplitNeeded(atom, inner)
            inner = common_divisor(extents[atom], inner)
            if 1 < inner < extents[atom]:
                raise SplitNeeded(atom, inner)
        raise NotAffine("a reshape regroups dimensions in a way that fits no loop order")
    return Affine(tuple(sorted(high.items())), high_constant), Affine(tuple(sorted(low.items())), low_constant)
