"""The length that a user declares to vary: which dimensions have it, and what calls look like at other lengths.

    dynamic_shapes={"x": {0: T}, "mask": {1: 2 * T}}       x[T, B, H], mask[B, 2 * T]

The notation is that of ``torch.export``: by names of arguments or in their order, nested as they are; for each tensor a
dictionary from dimensions, or a sequence of one entry for each, to a ``Dim``, ``Dim.DYNAMIC`` or ``Dim.AUTO``; ``None``
and numbers stay. All dimensions must follow from one length, and tensors that have it must be dense.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.errors import FuseError
from fuse.graph.fake_mode import FakeMode

SHORT = (11, 18, 37)
"""Lengths that are captured: odd and even, and without a common remainder, so that what rounds a length is noticed."""
_UNNAMED = "the length"


@dataclass(frozen=True)
class Extent:
    """The size of one dimension: ``factor * length + shift``. ``least`` and ``most`` bound the length."""

    name: str
    factor: int
    shift: int
    least: int
    most: int | None

    def at(self, length: int) -> int:
        return self.factor * length + self.shift

    def length_of(self, size: int) -> int | None:
        length, rest = divmod(size - self.shift, self.factor)
        return None if rest else length


Extents = Mapping[int, Extent]
"""The dimensions of one tensor that follow from the length."""


class NotOneLength(Exception):
    """A call is none of those that can be made at other lengths; the message is a reason."""


@dataclass(frozen=True)
class Varying:
    """A call whose tensors follow from one length. ``extents`` and ``orders`` (dimensions from the largest stride to
    the smallest) are those of the leaves that do."""

    length: int
    extents: Mapping[int, Extents]
    orders: Mapping[int, tuple[int, ...]]

    def layout(self, leaf: int, tensor: Tensor, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size and stride of a leaf at another length."""
        if leaf not in self.extents:
            return tuple(tensor.shape), tensor.stride()
        size = [self.extents[leaf][d].at(length) if d in self.extents[leaf] else n for d, n in enumerate(tensor.shape)]
        return tuple(size), _dense(size, self.orders[leaf])

    def short(self, taken: Collection[int]) -> tuple[int, ...] | None:
        """The short lengths to capture, or None where this call is about as short.

        ``taken`` are sizes that mean something else: a length that is equal to one of them might be taken for it.
        """
        extents = [extent for of_leaf in self.extents.values() for extent in of_leaf.values()]
        offset = max(0, *(extent.least - SHORT[0] for extent in extents))
        while any(extent.at(length + offset) in taken for extent in extents for length in SHORT):
            offset += 1
        chosen = tuple(length + offset for length in SHORT)
        most = min((extent.most for extent in extents if extent.most is not None), default=chosen[-1])
        return chosen if self.length > chosen[-1] and most >= chosen[-1] else None

    def arguments(self, leaves: Sequence[Any], structure: pytree.TreeSpec, length: int) -> Any:
        """The call's arguments at another length: (positional, by name), tensors without data."""
        mode = FakeMode(allow_non_fake_inputs=True)
        made: dict[int, Tensor] = {}
        for leaf, value in enumerate(leaves):
            if isinstance(value, Tensor) and id(value) not in made:
                if leaf not in self.extents:
                    made[id(value)] = mode.from_tensor(value)
                    continue
                size, stride = self.layout(leaf, value, length)
                with mode:
                    fake = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
                made[id(value)] = fake.requires_grad_(value.requires_grad)
        return pytree.tree_unflatten([made.get(id(leaf), leaf) for leaf in leaves], structure)


# ---- what is declared ------------------------------------------------------------------------------------------------


def check_names(model: nn.Module, declared: Any) -> None:
    """Raise ``FuseError`` where ``declared`` names an argument that ``forward`` does not have, or is no declaration."""
    if not isinstance(declared, (dict, tuple, list)):
        raise FuseError(f"dynamic_shapes is a {type(declared).__name__}; give a dictionary by names of arguments")
    parameters = inspect.signature(model.forward).parameters
    if isinstance(declared, dict) and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        for name in declared:
            if name not in parameters:
                close = difflib.get_close_matches(str(name), parameters, n=1)
                advice = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(parameters)}"
                raise FuseError(f"dynamic_shapes names {name!r}, which forward does not take; {advice}")


def varying(
    model: nn.Module, declared: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any]
) -> Varying:
    """How the tensors of a call follow from its length.

    Raises:
        NotOneLength: they do not, or in a way that is not supported.
        FuseError: the declaration does not fit the arguments.
    """
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    named = dict(declared) if isinstance(declared, dict) else dict(zip(bound, declared, strict=False))
    by_tensor: dict[int, Extents] = {}
    for name, value in bound.items():
        _collect(name, value, named.get(name), by_tensor)
    extents = {i: by_tensor[id(leaf)] for i, leaf in enumerate(leaves) if by_tensor.get(id(leaf))}
    lengths = {
        extent.length_of(leaves[i].shape[d]): f"{extent.name} = {leaves[i].shape[d]}"
        for i, of_leaf in extents.items()
        for d, extent in of_leaf.items()
    }
    names = {extent.name for of_leaf in extents.values() for extent in of_leaf.values()}
    if len(names) > 1:
        raise NotOneLength(f"{' and '.join(sorted(names))} vary, and only one length may")
    if len(lengths) != 1 or None in lengths:
        raise NotOneLength(f"the sizes do not follow from one length: {', '.join(sorted(lengths.values()))}")
    (length,) = lengths
    assert length is not None
    found = Varying(length, extents, {i: _order(leaves[i]) for i in extents})
    for i in extents:
        if found.layout(i, leaves[i], length)[1] != leaves[i].stride():
            raise NotOneLength("a tensor that has the length is laid out with gaps")
    return found


def _collect(name: str, value: Any, declared: Any, found: dict[int, Extents]) -> None:
    """Walk a declaration beside the argument that it is for."""
    if declared is None:
        return
    if isinstance(value, Tensor):
        entries = declared if isinstance(declared, dict) else dict(enumerate(declared))
        extents = {}
        for dim, one in entries.items():
            if not isinstance(dim, int) or not -value.dim() <= dim < value.dim():
                raise FuseError(f"dynamic_shapes gives dimension {dim!r} of {name}, which has {value.dim()}")
            if (extent := _extent(name, one)) is not None:
                extents[dim % value.dim()] = extent
        found[id(value)] = extents
    elif isinstance(value, (tuple, list)) and isinstance(declared, (tuple, list)):
        for number, (item, one) in enumerate(zip(value, declared, strict=False)):
            _collect(f"{name}[{number}]", item, one, found)
    elif isinstance(value, dict) and isinstance(declared, dict):
        for key, one in declared.items():
            _collect(f"{name}[{key!r}]", value.get(key), one, found)
    elif any(_extent(name, one) is not None for one in pytree.tree_leaves(declared)):
        raise FuseError(f"dynamic_shapes gives a size of {name}, which is a {type(value).__name__}")


def _extent(name: str, declared: Any) -> Extent | None:
    """What is declared of one dimension; None where it stays."""
    if declared is None or isinstance(declared, int):
        return None
    hint = getattr(getattr(declared, "type", None), "name", None)
    if hint in ("DYNAMIC", "AUTO", "STATIC"):
        bounds = (_bound(getattr(declared, "min", None)) or 0, _bound(getattr(declared, "max", None)))
        return None if hint == "STATIC" else Extent(_UNNAMED, 1, 0, *bounds)
    root, function = getattr(declared, "root", declared), getattr(declared, "fn", None)
    if not hasattr(root, "__name__") or not hasattr(root, "min"):
        raise FuseError(f"dynamic_shapes gives {declared!r} for a dimension of {name}; give a torch.export.Dim")
    shift, one = (function(0), function(1)) if function else (0, 1)
    return Extent(root.__name__, one - shift, shift, _bound(root.min) or 0, _bound(root.max))


def _bound(limit: Any) -> int | None:
    """A bound as a number; ``torch.export`` has an infinity of its own."""
    return limit if isinstance(limit, int) else None


# ---- layouts ---------------------------------------------------------------------------------------------------------


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the largest stride to the smallest."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))


def _dense(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dimensions lie in this order."""
    strides, step = [0] * len(size), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= size[dim]
    return tuple(strides)
