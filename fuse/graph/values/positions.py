"""Look-ups and writes at positions that tensors or Numbers hold, while ``forward`` is recorded.

    B[:, obs[t]]                  index(B, [None, obs[t]])                      eager: a view of B
    queue[ptr : ptr + 4] = k      index_put_(queue, [ptr + arange(4)], k)       eager: a copy to a view

Nothing is learned of the positions but that they lie within the tensor (:mod:`fuse.graph.values.tensor_indices`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fuse.graph.numbers.read_numbers import WantsPlain, distance, is_number, node_of
from fuse.graph.strides import broadcast
from fuse.graph.values.masked_elements import takes_gradients
from fuse.graph.values.tensor_indices import IndexCopies, looks_like_view, positions_in, viewed, window, windows_in
from fuse.graph.values.value_reads import Reader

aten = torch.ops.aten

View = Callable[[Tensor, Any], Tensor]
"""Indexes a tensor by parts that make views."""


class Positions:
    """The look-ups and writes of one recording, whose values ``reader`` reads."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._copies = IndexCopies()

    def looked_up(self, tensor: Tensor, index: Any, view: View) -> Tensor | None:
        """``tensor[index]`` as a look-up, if the index has integers in tensors; None if these must be learned."""
        if windows_in(index):
            return self._window(tensor, index, view)
        reader, found = self._reader, positions_in(index)
        tensors = [one for one in found if isinstance(one, Tensor)]
        if not found or reader.plain or not self._are_ours(tensors):
            return None
        nodes = [node_of(one) if is_number(one) else reader.node(one) for one in found]
        if not any(map(reader.varies, nodes)):
            return None
        table, dims = viewed(tensor, index, view)
        sizes = [table.shape[dim] for dim in dims]
        if not all(-size <= reader.present(node) < size for node, size in zip(nodes, sizes, strict=True)):
            return None  # out of bounds: indexing with the learned numbers raises
        positions: list[Tensor | None] = [None] * (dims[-1] + 1)
        for dim, one, node in zip(dims, found, nodes, strict=True):
            positions[dim] = reader.tensor(node) if is_number(one) else one
        with reader.functional.fakes.aside():
            if not looks_like_view(table, dims, positions):
                return None
        for one in tensors:
            reader.begin(one)
        return self._copied(table, lambda: aten.index.Tensor(table, positions))

    def _window(self, tensor: Tensor, index: Any, view: View) -> Tensor | None:
        """``tensor[index]`` as a look-up, if the index has slices whose ends are integers in tensors."""
        found = self._bounds(tensor, index, view)
        if found is None:
            return None
        table, dims, starts, lengths = found
        return self._copied(table, lambda: window(table, dims, starts, lengths))

    def _bounds(
        self, tensor: Tensor, index: Any, view: View
    ) -> tuple[Tensor, list[int], list[Tensor], list[int]] | None:
        """The tensor that such slices cut, their dimensions, starts and lengths; None if their ends must be learned."""
        reader = self._reader
        ends = [end for one in windows_in(index) for end in (one.start, one.stop)]
        if reader.plain or not self._are_ours([end for end in ends if isinstance(end, Tensor)]):
            return None
        numbers = [end if is_number(end) else reader.item(end) for end in ends]
        if not all(map(is_number, numbers)):
            return None  # the same in each call
        table, dims = viewed(tensor, index, view)
        bounds = list(zip(dims, numbers[::2], numbers[1::2], strict=True))
        nodes = [(node_of(start), node_of(stop)) for _, start, stop in bounds]
        within = zip(dims, nodes, strict=True)
        if not all(0 <= reader.present(a) <= reader.present(b) <= table.shape[dim] for dim, (a, b) in within):
            return None  # slices cut such ends off
        lengths = []
        for (dim, first, end), (start, stop) in zip(bounds, nodes, strict=True):
            reader.truth(reader.emit(aten.ge.Scalar, start, 0))
            reader.truth(reader.emit(aten.le.Scalar, stop, table.shape[dim]))
            length = distance(first, end)
            lengths.append(reader.number(reader.emit(aten.sub.Tensor, stop, start)) if length is None else length)
        return table, dims, [reader.tensor(start) for start, _ in nodes], lengths

    def stored(self, tensor: Tensor, index: Any, value: Any, view: View) -> bool:
        """Record ``tensor[index] = value`` as a write at positions, if one part of the index is a Number, or a slice
        between two; False if these must be learned."""
        if not _has_numbers(index) or not self._may_store(tensor, value):
            return False
        reader = self._reader
        if windows_in(index):
            found = self._bounds(tensor, index, view)
            if found is None or len(found[1]) > 1:
                return False
            table, dims, (start,), (length,) = found
            place = reader.uncounted(lambda: start + torch.arange(length))
        else:
            if len(numbers := positions_in(index)) != 1 or reader.plain:
                return False
            table, dims = viewed(tensor, index, view)
            node = node_of(numbers[0])
            if not -table.shape[dims[0]] <= reader.present(node) < table.shape[dims[0]]:
                return False
            place = reader.tensor(node)
        written = [*table.shape[: dims[0]], *place.shape, *table.shape[dims[0] + 1 :]]
        if broadcast([value.shape, written]) != tuple(written):
            return False  # eager raises, or drops dimensions
        reader.gave_symbols = True
        made = reader.uncounted(lambda: value.to(table.dtype))
        aten.index_put_.default(table, [*[None] * dims[0], place], made)
        return True

    def _may_store(self, tensor: Tensor, value: Any) -> bool:
        """Whether eager's write of ``value`` to a part of ``tensor`` is one to positions."""
        if not isinstance(value, Tensor) or tensor.requires_grad or takes_gradients([value]):
            return False
        return self._reader.base_of(tensor) is not self._reader.base_of(value)

    def _are_ours(self, tensors: Sequence[Tensor]) -> bool:
        return all(isinstance(one, FakeTensor) and one.fake_mode is self._reader.fake_mode for one in tensors)

    def _copied(self, table: Tensor, copy: Callable[[], Tensor | None]) -> Tensor | None:
        """The ``copy`` of a part of ``table``, where eager returns a view."""
        result = self._reader.uncounted(copy)
        if result is not None:
            self._reader.gave_symbols = True
            self.copied(table, result)
        return result

    def copied(self, table: Tensor, copy: Tensor) -> None:
        """Note that eager has a view of ``table``, or ``table`` itself, where the graph has a ``copy``."""
        self._copies.add(self._reader.base_of(table), self._reader.base_of(copy))

    def check(self, leaves: Sequence[Any]) -> None:
        """Check that the caller, who gets ``leaves``, cannot notice that look-ups are no views.

        Raises:
            WantsPlain: the call is recorded again, and the positions are learned.
        """
        returned = [self._reader.base_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        if self._copies.are_visible(returned):
            raise WantsPlain


def _has_numbers(index: Any) -> bool:
    """Whether a part of an index is a Number, or a slice with one as its end."""
    parts = index if type(index) is tuple else (index,)
    ends = (end for part in parts for end in ((part.start, part.stop) if type(part) is slice else (part,)))
    return any(map(is_number, ends))
