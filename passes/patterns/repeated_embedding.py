"""Look the rows that all sequences of a batch share up in the kernel that adds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuse.rewrite.patterns.definition import Failure, Match
from fuse.rewrite.patterns.language import const
from fuse.rewrite.patterns.registry import pattern

aten = torch.ops.aten


@pattern
class RepeatedEmbedding:
    """A sum with an embedding that all sequences of a batch share, such as positions.

    Position ids are ``[1, length]`` or ``[length]``. Without the pattern, a kernel of its own looks their rows up for
    one sequence. With the pattern, the kernel that sums the embeddings looks them up for each sequence, together with
    the layer norm that follows: one launch less. The table's rows are in the cache after the first sequence.

    Declined where there are as many ids as rows of the sum.

    Source: microsoft/onnxruntime, onnxruntime/python/tools/transformers/fusion_embedlayer.py.
    """

    def pattern(self, x: Tensor, table: Tensor, ids: Tensor) -> Any:
        return x + aten.embedding(table, ids, const("padding"))

    def check(self, m: Match) -> Failure | None:
        if m["ids"].meta["val"].shape == m.outputs[0].meta["val"].shape[:-1]:
            return m.fail("a row is looked up for each row of the sum already", m["ids"])
        return None

    def replace(self, x: Tensor, table: Tensor, ids: Tensor) -> Any:
        rows = torch.broadcast_shapes(x.shape[:-1], ids.shape)
        return x + aten.embedding(table, ids.expand(rows), const("padding"))

    def examples(self) -> Any:
        return torch.randn(2, 3, 4), torch.randn(5, 4), torch.randint(5, (1, 3))
