"""Reused memory for the tensors that forward programs save for backward programs.

    step 1   the forward program fills a block, and autograd holds its tensors     backward has run: the block is free
    step 2   the forward program fills the same block                              its pages exist already

New memory costs about as much as writing to it: the system creates each page when it is first written, and takes large
pieces back when they are freed. A block is reused once nothing outside of this file holds one of its tensors, or shares
its memory; an autograd graph that is kept keeps its block. Gradients that are copied to the layout of a backward
program are in blocks too. All programs share the blocks, and few unused ones are kept.
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
from fuse.graph.strides import extent
from fuse.runtime.programs.layout import part
from fuse.runtime.programs.plan import aligned

LEAST_BYTES = 2**16
"""Fewest bytes that a call saves in a block; for less, a new allocation is cheap."""
MOST_UNUSED = 64
"""Calls of all programs after which an unused block is freed; checked as often, so that it takes at most twice as
many."""

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
"""Number of holders of a storage in native code; torch's CUDA graph memory uses the same function."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Block:
    """A block of ``bytes`` of memory.

    ``tensors`` are the saved tensors of its last owner, which never leave this file. ``address`` is that of the storage
    object. ``used`` is the index of the call that used the block last.
    """

    storage: torch.UntypedStorage
    address: int
    bytes: int
    tensors: tuple[Tensor, ...] = ()
    owner: weakref.ref[SavedMemory] | None = None
    used: int = 0

    def is_free(self) -> bool:
        """Whether no tensor, array or storage outside of this file shares the block's memory."""
        references, holders = _alone()
        free: bool = sys.getrefcount(self.storage) == references
        return free and _use_count(self.address) == holders + len(self.tensors)


class SavedMemory:
    """Allocator of tensors like ``values`` for each call of a program; several threads may use it."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._layouts = [(tuple(v.shape), v.stride()) for v in values]
        self._dtypes = [v.dtype for v in values]
        sizes = [aligned(extent(value)) for value in values]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.bytes, self.device = sum(sizes), values[0].device
        self._block: weakref.ref[_Block] | None = None  # the one used last
        weakref.finalize(self, _forget_unowned)

    def take(self) -> list[Tensor]:
        """New tensors, whose memory is reused when they and all tensors that share it are gone."""
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
    """Whether memory for tensors like ``values`` is worth reusing, and torch counts the holders of a storage."""
    return _use_count is not None and sum(map(extent, values)) >= LEAST_BYTES


def forget() -> None:
    """Free all unused blocks; those in use are freed when their tensors are gone."""
    global _blocks
    with _lock:
        _blocks = ()


def _forget_unowned() -> None:
    global _blocks  # a tuple, because the garbage collector may call this during a call
    with _lock:
        _blocks = tuple(block for block in _blocks if block.owner is not None and block.owner() is not None)


def _new_block(size: int, device: torch.device) -> _Block:
    storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
    return _Block(storage, storage._cdata, size)


@cache
def _alone() -> tuple[int, int]:
    """Numbers of references to the storage of an unused block, in Python and in native code, without its own
    tensors."""
    block = _new_block(1, HOST)
    block.tensors = (torch.empty(0, dtype=torch.uint8, device=HOST).set_(block.storage),)
    return sys.getrefcount(block.storage), _use_count(block.address) - len(block.tensors)


_lock = ForkedLock()
_blocks: tuple[_Block, ...] = ()
_calls = 0
