"""Arguments to try a pattern with: usual ones, and the cases that authors forget.

    usual               float32[8, 8]; one sample for each way through the pattern, and for each value of a constant
    shapes              dependent sizes changed together; size one, size zero
    dtypes              float64, bfloat16, float16, int64, and one input of another dtype than the others
    strides             transposed, expanded, every other element of something larger
    special values      one element NaN, infinite, zero, minus zero, huge
    aliased inputs      one tensor in two places

Only arguments that the pattern itself accepts become samples. Equal seeds give equal samples.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.graph.describing import dtype_name
from fuse.rewrite.patterns import guesses
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.forms import runs, takes_lists
from fuse.rewrite.patterns.language import Environment
from fuse.rewrite.patterns.tracing import why_not

MAX_WAYS = 8
"""Ways through one pattern (choices of its alternatives) that are tried."""

SHAPES = 12
SIZES = (11, 1, 5, 2, 0, 3)
LARGEST = 2**20
"""The most elements of a result of a sample."""

_DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.int64)
_FINITE = (0.0, -0.0)
_SPECIAL = (*_FINITE, math.nan, math.inf, -math.inf, 1e30)
_GUESSED = 1009
_SMALL = (2, 1, 0, 0.5)


@dataclass(frozen=True)
class Kind:
    """Description of a tensor to make: ``laid_out`` is its memory layout, ``special`` the value of one element."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    laid_out: str = "contiguous"
    special: float | None = None

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def made(self, generator: torch.Generator) -> Tensor:
        """A tensor of this kind, with values near one, half of them negative."""
        tensor = _laid_out(values(self.shape, self.dtype, generator), self.laid_out)
        if self.special is not None and tensor.numel() and tensor.is_floating_point():
            tensor.view(-1)[tensor.numel() // 2] = self.special
        return tensor


@dataclass(frozen=True)
class Sample:
    """One call of a pattern: ``what`` names its special trait; ``same`` are two inputs that are one tensor."""

    what: str
    kinds: tuple[Any, ...]
    constants: Mapping[str, Any]
    choices: Mapping[str, int]
    same: tuple[int, int] | None = None

    @property
    def environment(self) -> Environment:
        return Environment(self.constants, self.choices)

    @property
    def may_be_at_a_kink(self) -> bool:
        """Whether values are such that two right formulas may differ in gradients: relu and clamp at 0 or NaN."""
        kinds = pytree.tree_leaves(list(self.kinds))
        return self.same is not None or any(isinstance(kind, Kind) and kind.special is not None for kind in kinds)

    def arguments(self) -> tuple[Any, ...]:
        """The pattern's arguments: tensors and lists of tensors."""
        generator = torch.Generator().manual_seed(0)
        made = pytree.tree_map_only(Kind, lambda kind: kind.made(generator), list(self.kinds))
        if self.same is not None:
            made[self.same[1]] = made[self.same[0]]
        return tuple(made)

    def runs(self, pattern: Pattern) -> bool:
        """Whether the pattern runs with these arguments."""
        empty = pytree.tree_map_only(Kind, Kind.empty, list(self.kinds))
        return why_not(_small(pattern.function), empty, self.environment) is None

    def __str__(self) -> str:
        given = [*map(_described, self.kinds), *(f"{name}={value}" for name, value in self.constants.items())]
        return f"{self.what}: {', '.join(given)}" + ("; finite=True allows this" if self.may_overflow else "")

    @property
    def may_overflow(self) -> bool:
        """Whether an element is NaN, infinite or huge; ``finite=True`` leaves such samples out."""
        kinds = pytree.tree_leaves(list(self.kinds))
        return any(isinstance(kind, Kind) and kind.special not in (None, *_FINITE) for kind in kinds)


def samples(pattern: Pattern, shapes: int = SHAPES) -> Iterator[Sample]:
    """The samples to try ``pattern`` with; the first one of each way through it is the usual one.

    Raises:
        FuseError: the pattern cannot be run.
    """
    for usual in usual_samples(pattern):
        yield usual
        tried = (*_constants(usual), *_shapes(usual, pattern, shapes), *_dtypes(usual), *_strides(usual))
        for sample in (*tried, *_specials(usual, pattern.finite), *_aliased(usual)):
            if sample.runs(pattern):
                yield sample


def usual_samples(pattern: Pattern) -> Iterator[Sample]:
    """One sample for each way through ``pattern``, with each of its examples; at most ``MAX_WAYS``."""
    return itertools.islice(_usual(pattern), MAX_WAYS)


def _usual(pattern: Pattern) -> Iterator[Sample]:
    lists = max(2, takes_lists(pattern)) if takes_lists(pattern) else 1
    examples = [[example] for example in guesses.example_arguments(pattern)] or [[]]
    for given in examples:
        for choices, run in runs(pattern, given, lists):
            kinds = pytree.tree_map_only(Tensor, lambda t: Kind(tuple(t.shape), t.dtype), list(run.arguments))
            sample = Sample("as usual", tuple(kinds), run.constants, choices)
            yield next((small for small in _with_small_constants(sample) if small.runs(pattern)), sample)


def _with_small_constants(sample: Sample) -> Iterator[Sample]:
    """``sample`` with small numbers for the guessed constants (``_GUESSED`` is a number that occurs nowhere else)."""
    guessed = [name for name, value in sample.constants.items() if value == _GUESSED]
    for values in itertools.product(_SMALL, repeat=min(len(guessed), 2)):
        chosen = {name: values[min(place, 1)] for place, name in enumerate(guessed)}
        yield replace(sample, constants={**sample.constants, **chosen})


def _constants(usual: Sample) -> Iterator[Sample]:
    for name, value in usual.constants.items():
        for other in _others(value):
            yield replace(usual, what=f"another {name}", constants={**usual.constants, name: other})


def _others(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    return (value + 1, value * 3) if isinstance(value, (int, float)) else ()


def _shapes(usual: Sample, pattern: Pattern, count: int) -> Iterator[Sample]:
    """Samples of other sizes: those that may change, alone or with one of another tensor, in random combinations."""
    draw = random.Random(0)
    places = [
        (i, dim) for i, kind in enumerate(usual.kinds) if isinstance(kind, Kind) for dim in range(len(kind.shape))
    ]
    ranks = {dim: tuple(place for place in places if place[1] == dim) for _, dim in places}
    groups = [(place,) for place in places] + list(itertools.combinations(places, 2)) + list(ranks.values())
    free = [group for group in dict.fromkeys(groups) if _resized(usual, group, SIZES[0]).runs(pattern)]
    for number in range(count if free else 0):
        sample = usual
        for group in [free[number]] if number < len(free) else draw.sample(free, min(len(free), 2 + number % 2)):
            changed = _resized(sample, group, SIZES[number % len(SIZES) if number >= len(free) else number % 2])
            sample = changed if changed.runs(pattern) else sample
        yield replace(sample, what="other sizes")


def _resized(sample: Sample, places: Sequence[tuple[int, int]], size: int) -> Sample:
    kinds = list(sample.kinds)
    for i, dim in places:
        shape = list(kinds[i].shape)
        shape[dim] = size
        kinds[i] = replace(kinds[i], shape=tuple(shape))
    return replace(sample, kinds=tuple(kinds))


def _dtypes(usual: Sample) -> Iterator[Sample]:
    places = [i for i, kind in enumerate(usual.kinds) if not isinstance(kind, Kind) or kind.dtype.is_floating_point]
    for dtype in _DTYPES:
        yield _changed(usual, f"all {dtype_name(dtype)}", places, dtype=dtype)
    for place in places:
        for dtype in _DTYPES[:2]:
            yield _changed(usual, f"{dtype_name(dtype)} in one place", [place], dtype=dtype)


def _strides(usual: Sample) -> Iterator[Sample]:
    places = range(len(usual.kinds))
    for laid_out in ("transposed", "every other", "expanded"):
        yield _changed(usual, f"all {laid_out}", places, laid_out=laid_out)
        for place in places:
            yield _changed(usual, f"{laid_out} in one place", [place], laid_out=laid_out)


def _specials(usual: Sample, finite: bool) -> Iterator[Sample]:
    for place, kind in enumerate(usual.kinds):
        if isinstance(kind, Kind) and kind.dtype.is_floating_point:
            for value in _SPECIAL if not finite else _FINITE:
                yield _changed(usual, f"{value:g} in one place", [place], special=value)


def _aliased(usual: Sample) -> Iterator[Sample]:
    for i, j in itertools.combinations(range(len(usual.kinds)), 2):
        if isinstance(usual.kinds[i], Kind) and usual.kinds[i] == usual.kinds[j]:
            yield replace(usual, what="one tensor in two places", same=(i, j))


def _changed(sample: Sample, what: str, places: Sequence[int], **changes: Any) -> Sample:
    """``sample`` with ``changes`` to the tensors (and lists of tensors) at ``places``."""
    kinds = list(sample.kinds)
    for place in places:
        kinds[place] = pytree.tree_map_only(Kind, lambda kind: replace(kind, **changes), kinds[place])
    return replace(sample, what=what, kinds=tuple(kinds))


def _small(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, but with an error for results of more than ``LARGEST`` elements."""

    def limited(*arguments: Any) -> Any:
        result = function(*arguments)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel() > LARGEST:
                raise ValueError(f"a result of {tensor.numel()} elements")
        return result

    return limited


def values(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, most: int = 4) -> Tensor:
    """Numbers near one, half of them negative; integers below ``most``."""
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128).to(dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, most, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _laid_out(tensor: Tensor, how: str) -> Tensor:
    """``tensor`` in another layout; ``expanded`` repeats its first row, so that its values change too."""
    if how == "transposed" and tensor.dim() > 1:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "every other" and tensor.dim():
        wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), dtype=tensor.dtype)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if how == "expanded" and tensor.dim() and tensor.shape[0]:
        return tensor[:1].expand(tensor.shape)
    return tensor


def _described(kind: Any) -> str:
    if not isinstance(kind, Kind):
        return f"[{', '.join(map(_described, kind))}]"
    marks = ["" if kind.laid_out == "contiguous" else f" {kind.laid_out}"]
    marks.append("" if kind.special is None else f" with one {kind.special:g}")
    return f"{dtype_name(kind.dtype)}{list(kind.shape)}{''.join(marks)}"
