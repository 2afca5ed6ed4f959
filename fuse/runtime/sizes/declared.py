"""Sizes that a user declares to vary (``dynamic_shapes``): their dimensions, and a made-up call at other sizes.

    dynamic_shapes={"x": {0: T, 1: B}, "mask": {1: 2 * T}}       x[T, B, H], mask[B, 2 * T]

The notation is that of ``torch.export``: a dictionary by argument name or a sequence in their order, nested like the
arguments. For each tensor, it has a dictionary from dimensions, or a sequence with an entry for each dimension, of
``Dim``, ``Dim.DYNAMIC`` or ``Dim.AUTO``; ``None`` and numbers are constant dimensions. A made-up call at other sizes is
captured before the first call, and kernels are then made for varying sizes. A declaration has no other effect: each
call is checked like any other.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.errors import FuseError
from fuse.graph.strides import dense_strides, is_dense
from fuse.kernel.arithmetic.extents import LEAST_LOWERED
from fuse.kernel.sizes.region_text import Numbers

SHORT = 11
"""The preferred least size of a made-up call: loops with this number of steps are rolled."""
FURTHEST = 256
"""Range of the sizes that are tried for a made-up call, where no largest size is declared."""


@dataclass(frozen=True)
class DeclaredSize:
    """A dimension of extent ``factor * value + shift``, where ``value`` is the size ``name`` from ``least`` to
    ``most``."""

    name: str
    factor: int
    shift: int
    least: int
    most: int | None

    def at(self, value: int) -> int:
        return self.factor * value + self.shift


Sizes = Mapping[int, DeclaredSize]
"""The varying dimensions of one tensor, by dimension."""


def check_declaration(model: nn.Module, declared: Any) -> None:
    """Raise ``FuseError`` if ``declared`` is no declaration, or names an argument that ``forward`` does not have."""
    if declared is None or (isinstance(declared, str) and declared == "auto"):
        return
    if not isinstance(declared, (dict, tuple, list)):
        raise FuseError(
            f"dynamic_shapes is a {type(declared).__name__}; give a dictionary by names of arguments, 'auto' or None"
        )
    parameters = inspect.signature(model.forward).parameters
    if isinstance(declared, dict) and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        for name in declared:
            if name not in parameters:
                close = difflib.get_close_matches(str(name), parameters, n=1)
                advice = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(parameters)}"
                raise FuseError(f"dynamic_shapes names {name!r}, which forward does not take; {advice}")


def elsewhere(
    model: nn.Module, declared: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any]
) -> Numbers | None:
    """The sizes and strides of the tensors of a made-up call at other sizes; None if there is no such call.

    Raises:
        FuseError: the declaration does not fit the arguments.
    """
    sizes = declared_sizes(model, declared, args, kwargs, leaves)
    values = _values(sizes, leaves)
    varying = [leaves[i] for i in sizes]
    if not values or min(values.values()) < LEAST_LOWERED or not all(map(is_dense, varying)):
        return None
    held = (*leaves, *model.parameters(), *model.buffers())
    taken = {n for tensor in held if isinstance(tensor, Tensor) for n in tensor.shape}
    others = _others(sizes, values, taken)
    if others is None:
        return None
    layouts: dict[int, Numbers] = {}
    for i, leaf in enumerate(leaves):
        if i in sizes:
            size = [sizes[i][d].at(others[sizes[i][d].name]) if d in sizes[i] else n for d, n in enumerate(leaf.shape)]
            order = sorted(range(leaf.dim()), key=lambda d: (leaf.stride(d), -d))
            layouts[id(leaf)] = (*size, *dense_strides(size, order))
        elif isinstance(leaf, Tensor):
            layouts[id(leaf)] = (*leaf.shape, *leaf.stride())
    return tuple(chain(*layouts.values()))


def declared_sizes(
    model: nn.Module, declared: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any]
) -> dict[int, Sizes]:
    """The varying dimensions, by the position of a leaf."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError:  # the call itself raises the error
        return {}
    named = dict(declared) if isinstance(declared, dict) else dict(zip(bound, declared, strict=False))
    by_tensor: dict[int, Sizes] = {}
    for name, value in bound.items():
        _collect(name, value, named.get(name), by_tensor)
    return {i: by_tensor[id(leaf)] for i, leaf in enumerate(leaves) if by_tensor.get(id(leaf))}


def _values(sizes: Mapping[int, Sizes], leaves: Sequence[Any]) -> dict[str, int]:
    """The value of each size in this call."""
    found: dict[str, int] = {}
    for i, of_leaf in sizes.items():
        for dim, size in of_leaf.items():
            value, rest = divmod(leaves[i].shape[dim] - size.shift, size.factor)
            if rest or found.setdefault(size.name, value) != value:
                raise FuseError(f"dynamic_shapes says that {size.name} is one size, and a call has several for it")
    return found


def _others(sizes: Mapping[int, Sizes], values: Mapping[str, int], taken: Set[int]) -> dict[str, int] | None:
    """A new value for each size, all distinct, unlike ``taken``, and each with a different distance from its old
    value."""
    found: dict[str, int] = {}
    apart = set(taken)
    by_name: dict[str, list[DeclaredSize]] = {}
    for of_leaf in sizes.values():
        for size in of_leaf.values():
            by_name.setdefault(size.name, []).append(size)
    for name, of_name in by_name.items():
        for value in _candidates(max(s.least for s in of_name), min((s.most for s in of_name if s.most), default=None)):
            new = {size.at(value) for size in of_name}
            shifts = {value - values[name], *(other - values[known] for known, other in found.items())}
            if (
                value != values[name]
                and min(new) >= LEAST_LOWERED
                and not new & apart
                and len(shifts) == len(found) + 1
            ):
                found[name] = value
                apart |= new
                break
        else:
            return None
    return found


def _candidates(least: int, most: int | None) -> Iterator[int]:
    """Values within bounds, from ``SHORT`` upwards, then those below it."""
    first, last = max(least, LEAST_LOWERED), FURTHEST + least if most is None else most
    middle = max(first, min(SHORT, last))
    return chain(range(middle, last + 1), range(middle - 1, first - 1, -1))


# ---- what is declared ------------------------------------------------------------------------------------------------


def _collect(name: str, value: Any, declared: Any, found: dict[int, Sizes]) -> None:
    """Add the declared sizes of an argument and of tensors nested in it to ``found``, by ``id`` of the tensor."""
    if declared is None:
        return
    if isinstance(value, Tensor):
        entries = declared if isinstance(declared, dict) else dict(enumerate(declared))
        sizes = {}
        for dim, one in entries.items():
            if not isinstance(dim, int) or not -value.dim() <= dim < value.dim():
                raise FuseError(f"dynamic_shapes gives dimension {dim!r} of {name}, which has {value.dim()}")
            if (size := _size(name, one, value.shape[dim])) is not None:
                sizes[dim % value.dim()] = size
        found[id(value)] = sizes
    elif isinstance(value, (tuple, list)) and isinstance(declared, (tuple, list)):
        for number, (item, one) in enumerate(zip(value, declared, strict=False)):
            _collect(f"{name}[{number}]", item, one, found)
    elif isinstance(value, dict) and isinstance(declared, dict):
        for key, one in declared.items():
            _collect(f"{name}[{key!r}]", value.get(key), one, found)
    elif any(_size(name, one, 0) is not None for one in pytree.tree_leaves(declared)):
        raise FuseError(f"dynamic_shapes gives a size of {name}, which is a {type(value).__name__}")


def _size(name: str, declared: Any, now: int) -> DeclaredSize | None:
    """The declared size of a dimension of extent ``now``; None for a constant one.

    Dimensions declared without a name are one size if their extents are equal.
    """
    if declared is None or isinstance(declared, int):
        return None
    hint = getattr(getattr(declared, "type", None), "name", None)
    if hint in ("DYNAMIC", "AUTO", "STATIC"):
        bounds = (_bound(getattr(declared, "min", None)) or 0, _bound(getattr(declared, "max", None)))
        return None if hint == "STATIC" else DeclaredSize(f"the size {now}", 1, 0, *bounds)
    root, function = getattr(declared, "root", declared), getattr(declared, "fn", None)
    if not hasattr(root, "__name__") or not hasattr(root, "min"):
        raise FuseError(f"dynamic_shapes gives {declared!r} for a dimension of {name}; give a torch.export.Dim")
    shift, one = (function(0), function(1)) if function else (0, 1)
    return DeclaredSize(root.__name__, one - shift, shift, _bound(root.min) or 0, _bound(root.max))


def _bound(limit: Any) -> int | None:
    """A bound as a number; ``torch.export`` has an infinity of its own."""
    return limit if isinstance(limit, int) else None
