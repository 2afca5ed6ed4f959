"""Tensors of elements chosen by a boolean mask, whose number stays unknown as long as possible.

    x[mask] = y[mask] * 2          the same operators for any number of chosen elements: the number is not learned
    n = y[mask].shape[0]           learned
    y[mask].softmax(0)             learned: a softmax is not known to be independent of the number

``MaskedElements`` tensors intercept the torch functions that receive them. These do the same for any number of chosen
elements: elementwise operators whose other operands are numbers, or tensors without the dimension of chosen elements;
and writes to the elements that the same mask chooses. Any other function learns the number, and so does an operator of
which a gradient is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from fuse import ops
from fuse.graph.numbers.read_numbers import WantsPlain

aten = torch.ops.aten

_FUNCTIONS = frozenset(
    """
    abs add clamp clamp_max clamp_min cos detach div double exp float getitem half iadd imul index_put isub itruediv log
    maximum minimum mul multiply neg pow radd relu rmul rsub rtruediv setitem sigmoid sin sqrt square sub subtract tanh
    to true_divide truediv type
    """.split()  # noqa: SIM905
)
"""Functions that do not learn a size, by name without underscores."""

_FACTS = frozenset("dtype device requires_grad is_leaf layout grad_fn is_cpu is_cuda".split())  # noqa: SIM905


class MaskedElements(FakeTensor):
    """The fake tensor of elements chosen by a mask; ``learned`` is called before a function that may learn their
    number."""

    learned: Callable[[Tensor], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if type(leaf) is MaskedElements]
            if not _tells_nothing(func):
                _learn(given)
            try:
                return func(*args, **(kwargs or {}))
            except Exception:  # it may depend on the size
                _learn(given)
                raise


def _learn(given: Sequence[MaskedElements]) -> None:
    for leaf in given:
        leaf.learned(leaf)


def _tells_nothing(func: Any) -> bool:
    """Whether a torch function does the same for any number of chosen elements; its operators are checked later."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _FACTS
    return name.strip("_") in _FUNCTIONS


def selects_by_mask(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the call indexes a tensor by one mask.

    >>> mask = torch.tensor([True, False])
    >>> selects_by_mask(aten.index.Tensor, (torch.ones(2), [mask])), selects_by_mask(aten.nonzero.default, (mask,))
    (True, False)
    """
    return op is aten.index.Tensor and mask_of(args[1]) is not None


def mask_of(indices: Any) -> Any:
    """The mask, if ``indices`` (tensors or nodes) are one mask over the first dimensions; otherwise None."""
    if len(indices) != 1:
        return None
    value = indices[0].meta["val"] if isinstance(indices[0], Node) else indices[0]
    return indices[0] if isinstance(value, Tensor) and value.dtype is torch.bool and value.dim() else None


def takes_gradients(operands: Iterable[Tensor]) -> bool:
    """Whether autograd follows an operator on these operands; its gradient is taken at the sizes of one call."""
    return torch.is_grad_enabled() and any(one.requires_grad for one in operands)


class MaskSelections:
    """The :class:`MaskedElements` of one recording.

    ``node``: gives the node of a tensor. ``key``: equal for nodes that compute the same. ``learn``: called with each
    node whose size is learned.
    """

    def __init__(
        self, node: Callable[[Tensor], Node], key: Callable[[Node], int], learn: Callable[[Node], None]
    ) -> None:
        self._node = node
        self._key = key
        self._learn = learn
        self.sources: dict[int, tuple[Tensor, int, frozenset[Node]]] = {}
        """``id`` of a tensor -> the tensor, the key of the mask that chose it, the nodes that determine its size."""
        self.unknown: dict[int, tuple[Tensor, int]] = {}
        """The tensors of a finished recording whose size was not learned: ``id`` -> the tensor, the key of its mask."""

    def add(self, tensor: Tensor, mask: Tensor) -> None:
        """Note that ``tensor`` has the elements chosen by ``mask``."""
        self._note(tensor, self._key(self._node(mask)), frozenset([self._node(tensor)]))

    def follow(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note the recorded call of ``op``: its result has an unknown number of elements, too, or the number is
        learned."""
        if not self.sources and not self.unknown:
            return
        given = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        if any(id(leaf) in self.unknown for leaf in given):
            raise WantsPlain
        compact = [self.sources[id(leaf)] for leaf in given if id(leaf) in self.sources]
        if not compact:
            return
        mask = compact[0][1]
        if all(one[1] == mask for one in compact) and not takes_gradients(given):
            if op in _WRITES and not any(id(leaf) in self.sources for leaf in (args[0], *args[1])):
                written, adds = mask_of(args[1]), len(args) > 3 and args[3]
                same = written is not None and self._key(self._node(written)) == mask
                if same and not adds and args[2].dim() == args[0].dim() - written.dim() + 1:
                    return
            elif ops.is_pointwise(op) and isinstance(result, Tensor) and result.shape == compact[0][0].shape:
                others = [leaf for leaf in given if id(leaf) not in self.sources]
                if all(leaf.dim() < result.dim() for leaf in others):
                    self._note(result, mask, frozenset().union(*(one[2] for one in compact)))
                    return
        for tensor, _, _ in compact:
            self.learn(tensor)

    def learn(self, tensor: Tensor) -> None:
        """Learn the size of ``tensor``."""
        if found := self.sources.get(id(tensor)):
            for node in found[2]:
                self._learn(node)

    def forget(self, is_known: Callable[[Node], bool]) -> None:
        """Make all tensors ordinary fake tensors again. A gradient must not read those whose size is not ``is_known``:
        it would be that of one call."""
        for tensor, mask, nodes in self.sources.values():
            if not all(map(is_known, nodes)):
                self.unknown[id(tensor)] = tensor, mask
            plain: Any = tensor
            plain.__class__ = FakeTensor
            del plain.learned
        self.sources.clear()

    def refuse_mask(self, key: int) -> None:
        """Refuse a gradient in which the mask with this key chooses elements, if their number was not learned.

        Raises:
            WantsPlain: the call is recorded again, and the number is learned.
        """
        if any(mask == key for _, mask in self.unknown.values()):
            raise WantsPlain

    def _note(self, tensor: Tensor, mask: int, nodes: frozenset[Node]) -> None:
        self.sources[id(tensor)] = tensor, mask, nodes
        compact: Any = tensor
        compact.__class__ = MaskedElements  # both classes have the same object layout
        compact.learned = self.learn


_WRITES = frozenset({aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default})
