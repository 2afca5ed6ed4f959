"""Memory for what forward programs save for backward ones, used again by later training steps.

    step 1   the forward program fills a block, autograd holds its tensors     backward is over: nobody does
    step 2   the forward program fills the same block                          its pages are there already

New memory costs about as much as writing to it: the system makes each page when it is first touched, and takes large
pieces back as soon as they are freed. A block is used again once nobody outside holds one of its tensors, or anything
else that shares their memory: who keeps a graph keeps its block. Gradients that do not lie as a backward program reads
them are copied into blocks, too. Blocks are shared by all programs, and few are held
that are not in use.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fuse.devices import HOST
from fuse.graph.locks import ForkedLock
from fuse.runtime.layout import extent, part

LEAST_BYTES = 2**16
"""Of one call, from which what it saves lies in a block."""
MOST_UNUSED = 64
"""Calls, of all programs, for which a block is held that none of them used; at most twice as many."""
_ALIGNMENT = 64

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors and others hold a storage; as the memory of CUDA graphs asks in torch."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Block:
    """``bytes`` of memory, and ``tensors`` that lie there as the program that used it last has them: they never leave
    this file.

    ``address`` is that of the storage itself. ``used``: the number of the call that used it last.
    """

    storage: torch.UntypedStorage
    address: int
    bytes: int
    tensors: tuple[Tensor, ...] = ()
    owner: weakref.ref[SavedMemory] | None = None
    used: int = 0

    def is_free(self) -> bool:
        """Whether nobody else holds memory of the block, by a tensor, an array or a storage."""
        references, holders = _alone()
        free: bool = sys.getrefcount(self.storage) == references
        return free and _use_count(self.address) == holders + len(self.tensors)


class SavedMemory:
    """Tensors like ``values`` for each call of a program. Several threads may take them at once."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._layouts = [(tuple(v.shape), v.stride()) for v in values]
        self._dtypes = [v.dtype for v in values]
        sizes = [-(-extent(value) // _ALIGNMENT) * _ALIGNMENT for value in values]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.bytes, self.device = sum(sizes), values[0].device
        self._block: weakref.ref[_Block] | None = None  # the one used last
        weakref.finalize(self, _forget_unowned)

    def take(self) -> list[Tensor]:
        """New tensors whose memory is used again when the last of them, and all that shares it, is gone."""
        global _blocks, _calls
        with _lock:
            _calls += 1
            block = self._own() or self._another()
            block.used = _calls
            if _calls % MOST_UNUSED == 0:
                _blocks = tuple(known for known in _blocks if _calls - known.used <= MOST_UNUSED)
            return [part(tensor, *how, 0) for tensor, how in zip(block.tensors, self._layouts, strict=True)]

    def _own(self) -> _Block | None:
        """The block that the last call used, if it is free."""
        block = None if self._block is None else self._block()
        return block if block is not None and block.owner is weakref.ref(self) and block.is_free() else None

    def _another(self) -> _Block:
        global _blocks
        block = next(filter(self._serves, reversed(_blocks)), None) or _new_block(self.bytes, self.device)
        block.tensors, block.owner, self._block = self._tensors(block.storage), weakref.ref(self), weakref.ref(block)
        if block not in _blocks:
            _blocks = (*_blocks, block)
        return block

    def _serves(self, block: _Block) -> bool:
        fits = self.bytes <= block.bytes <= 2 * self.bytes and block.storage.device == self.device
        return fits and block.is_free()

    def _tensors(self, storage: torch.UntypedStorage) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(0, dtype=dtype, device=self.device).set_(storage, offset // dtype.itemsize, size, stride)
            for offset, dtype, (size, stride) in zip(self._offsets, self._dtypes, self._layouts, strict=True)
        )


def can_be_used_again(values: Sequence[Tensor]) -> bool:
    """Whether memory for tensors like ``values`` had better be used again, and torch says when it may be."""
    return _use_count is not None and sum(map(extent, values)) >= LEAST_BYTES


def forget() -> None:
    """Free all blocks that are not in use, and those that are as soon as they are not."""
    global _blocks
    with _lock:
        _blocks = ()


def _forget_unowned() -> None:
    global _blocks  # a tuple, since the collector may come here in the middle of a call
    with _lock:
        _blocks = tuple(block for block in _blocks if block.owner is not None and block.owner() is not None)


def _new_block(size: int, device: torch.device) -> _Block:
    storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    return _Block(storage, storage._cdata, size)


@cache
def _alone() -> tuple[int, int]:
    """The references to the storage of a block that nobody uses, in Python and in native code, without its tensors."""
    block = _new_block(1, HOST)
    block.tensors = (torch.empty(0, dtype=torch.uint8, device=HOST).set_(block.storage),)
    return sys.getrefcount(block.storage), _use_count(block.address) - len(block.tensors)


_lock = ForkedLock()
_blocks: tuple[_Block, ...] = ()
_calls = 0
