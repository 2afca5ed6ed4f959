"""Further sizes at which ``forward`` is run with symbolic sizes, to find out how it uses them.

    x [16, 4, 8]    half of 16 is 8, which is also the width: a comparison with it seems to be constant
    x [37, 5, 8]    half of 37 is no other number of the graph: a comparison with it is recorded

Two numbers of one call may be equal by chance. So ``forward`` is also run at sizes from which code computes few numbers
that are in the graph.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.graph.structure.arguments import flatten_arguments
from fuse.kernel.sizes.region_text import Numbers

CANDIDATES = 24
"""Random choices of small sizes, and as many of large ones; the best of each is taken."""
SPAN = 128
"""Sizes are at most so much above the least captured ones: a loop takes as many steps."""


def probe_sizes(
    bounds: Sequence[tuple[int, int, int]],
    fits: Callable[[Numbers], bool],
    all_sizes: Callable[..., Numbers],
    numbers: Callable[..., Numbers],
    constants: Set[int],
) -> list[Numbers]:
    """Up to two choices of sizes, one in the lower and one in the upper half of the bounds.

    Args:
        bounds: the least and the largest value of each size, and the step between values.
        fits: whether the known graphs may serve such sizes.
        all_sizes: the sizes, and those derived from them, at given sizes.
        numbers: the numbers of a graph at given sizes.
        constants: those that are the same at all sizes.
    """

    def chances(sizes: Numbers) -> tuple[int, int, int]:
        return sum(size in constants for size in all_sizes(*sizes)), _by_chance(sizes, numbers(*sizes)), sum(sizes)

    draw = random.Random(0)
    bounds = [(least, min(largest, least + step * (SPAN // step)), step) for least, largest, step in bounds]
    found: list[Numbers] = []
    for half in range(2):
        tried = [tuple(_drawn(draw, half, *bound) for bound in bounds) for _ in range(CANDIDATES)]
        fitting = filter(fits, dict.fromkeys(tried))
        found += sorted(fitting, key=chances)[:1]
    return found


def sample_sizes(bounds: Sequence[tuple[int, int, int]]) -> Iterator[Numbers]:
    """Different choices of sizes within the bounds, their corners first.

    >>> list(sample_sizes([(2, 4, 1)]))
    [(2,), (4,), (3,)]
    """
    draw = random.Random(0)
    corners = product(*((least, largest) for least, largest, _ in bounds))
    drawn = (tuple(_drawn(draw, half, *bound) for bound in bounds) for _ in range(CANDIDATES) for half in range(2))
    yield from dict.fromkeys(chain(corners, drawn))


def _drawn(draw: random.Random, half: int, least: int, largest: int, step: int) -> int:
    steps = (largest - least) // step
    return least + step * draw.randint(half * steps // 2, (half + 1) * steps // 2)


def _by_chance(sizes: Numbers, numbers: Numbers) -> int:
    """Number of values that code may compute from the sizes and that are also numbers of the graph."""
    known = {number for number in numbers if type(number) is int}
    return sum(number in known for number in _computed(sizes))


def _computed(sizes: Sequence[int]) -> Iterator[int]:
    """Numbers from 2 on that code may compute from sizes.

    >>> sorted(set(_computed([7])))[:6]
    [2, 3, 4, 5, 6, 8]
    """
    for position, size in enumerate(sizes):
        made = [found for k in range(2, 9) for found in (size // k, -(-size // k), size % k, size * k)]
        made += [size + k for k in range(-8, 9) if k]
        made += [found for other in sizes[:position] for found in (size + other, abs(size - other), size * other)]
        made += [1 << size.bit_length(), math.isqrt(size)]
        yield from (number for number in made if number > 1 and number != size)


def arguments_at(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], numbers: Numbers
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with other integers, and tensors of other layouts; ``numbers`` begins with these.

    >>> (x, n), kwargs = arguments_at((torch.ones(2, 3), 7), {}, (8, 5, 3, 3, 1))
    >>> x.shape, n
    (torch.Size([5, 3]), 8)
    """
    leaves, structure = flatten_arguments(args, kwargs)
    rest = iter(numbers)
    leaves = [next(rest) if type(leaf) is int else leaf for leaf in leaves]
    made: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in made:
            size, stride = (tuple(next(rest) for _ in range(leaf.dim())) for _ in range(2))
            made[id(leaf)] = _laid_out(leaf, size, stride)
    made_up: tuple[tuple[Any, ...], dict[str, Any]]
    made_up = pytree.tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], structure)
    return made_up


def _laid_out(leaf: Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """``leaf`` if it has this layout, else a new tensor of its dtype and device with this layout."""
    if (tuple(leaf.shape), leaf.stride()) == (size, stride):
        return leaf
    if type(leaf) not in (Tensor, torch.nn.Parameter):
        raise TypeError(f"there is no {type(leaf).__name__} of another layout")
    made = torch.empty_strided(size, stride, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)
