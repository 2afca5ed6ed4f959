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

from fuse.graph.locks import ForkedLock
from fuse.runtime.layout import extent

LEAST_BYTES = 2**16
"""Of one call, from which what it saves lies in a block."""
MOST_UNUSED = 64
"""Calls, of all programs, for which a block is held that none of them used."""
_ALIGNMENT = 64

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors and others hold a storage; as the memory of CUDA graphs asks in torch."""


@dataclass(eq=False, frozen=True)
class _Block:
    """``memory``, and ``tensors`` that lie there as the program that used it last has them: they never leave this file.

    ``used``: the number of the call that used it last.
    """

    memory: Tensor
    tensors: tuple[Tensor, ...]
    owner: weakref.ref[SavedMemory]
    used: int

    def is_free(self) -> bool:
        """Whether nobody else holds memory of the block, by a tensor, an array or a storage."""
        references, holders = _alone()
        return _holders(self.memory) == (references, holders + len(self.tensors))


class SavedMemory:
    """Tensors like ``values`` for each call of a program. Several threads may take them at once."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._layouts = [(v.dtype, tuple(v.shape), v.stride()) for v in values]
        sizes = [-(-extent(value) // _ALIGNMENT) * _ALIGNMENT for value in values]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.bytes = sum(sizes)
        weakref.finalize(self, _forget_unowned)

    def take(self) -> list[Tensor]:
        """New tensors whose memory is used again when the last of them, and all that shares it, is gone."""
        global _blocks, _calls
        with _lock:
            _calls += 1
            found = next(filter(self._serves, reversed(_blocks)), None)
            if found is not None and found.owner() is self:
                memory, tensors = found.memory, found.tensors
            else:
                memory = torch.empty(self.bytes, dtype=torch.uint8, device="cpu") if found is None else found.memory
                tensors = self._tensors(memory.untyped_storage())
            _blocks = tuple(b for b in _blocks if b is not found and _calls - b.used <= MOST_UNUSED)
            _blocks += (_Block(memory, tensors, weakref.ref(self), _calls),)
            return [tensor.detach() for tensor in tensors]

    def _serves(self, block: _Block) -> bool:
        return self.bytes <= block.memory.numel() <= 2 * self.bytes and block.is_free()

    def _tensors(self, storage: torch.UntypedStorage) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset // dtype.itemsize, size, stride)
            for offset, (dtype, size, stride) in zip(self._offsets, self._layouts, strict=True)
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
        _blocks = tuple(block for block in _blocks if block.owner() is not None)


def _holders(memory: Tensor) -> tuple[int, int]:
    """References to the storage of ``memory``: in Python and in native code."""
    storage = memory.untyped_storage()
    return sys.getrefcount(storage), _use_count(storage._cdata)


@cache
def _alone() -> tuple[int, int]:
    """The references to a storage that one tensor has."""
    return _holders(torch.empty(1, device="cpu"))


_lock = ForkedLock()
_blocks: tuple[_Block, ...] = ()  # the one used last at the end
_calls = 0
