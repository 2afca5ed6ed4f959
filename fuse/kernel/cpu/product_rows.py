"""Rows of a product that lie in memory, and what is reduced over them.

scores [image, row, column]     ->     for row in rows of a block:        stages of a row nest, see ``rows.py``
softmax(scores + mask, -1)                 scores = block + row * stride
                                           columns: largest, sum, store
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from fuse.kernel.cpu.product_frame import NAMES, OF_BLOCK
from fuse.kernel.cpu.tiled_products import digits_of, place_of_product, taken_apart
from fuse.kernel.index import ZERO, NotAffine
from fuse.kernel.ir import Buffer, For, Pointer, Statement
from fuse.kernel.nest import Sink
from fuse.kernel.rows import RowNest
from fuse.kernel.values import Product, Reduce, Value

Digits = Sequence[tuple[str, int]]
"""Loop variables that count something together, outermost first, each with its extent."""


class ProductRows(RowNest):
    """Rows of a product that lie in memory at ``scores``, in the order of the reduction's own dimensions."""

    def __init__(
        self,
        targets: list[Sink],
        product: Product,
        scores: Buffer,
        inputs: list[Buffer],
        names: Mapping[int, str],
        reductions: list[Reduce],
    ) -> None:
        super().__init__(targets, inputs, names, reductions)
        self.product = product
        self.scores = scores

    def begin(self) -> None:
        """The product's result is in memory, a row of it at ``scores``."""
        roots = [(reduction.source, self._source_index(reduction)) for reduction in self.reductions]
        self.place = (ZERO, *place_of_product(roots, self.product, self.builder.extents))[-3:]
        self.builder.used_names.update(dict.fromkeys(NAMES, 1))
        self.builder.stored[id(self.product)] = (self.scores, self.place[2], self.place[-len(self.product.shape) :])

    def in_order_of(self, value: Value) -> bool:
        """Whether each element of ``value`` is made of the product's element at the same image, row and column."""
        return (ZERO, *self._full_index(value))[-3:] == self.place

    def image_and_row(self) -> tuple[Digits, Digits]:
        """The loop variables that count images and rows, checked to leave those of a row to its reductions."""
        extents = (1, *self.product.shape)[-3:]
        images, rows, columns = map(digits_of, self.place, extents, [self.builder.extents] * 3)
        if self.lane or [atom for atom, _ in columns] != self.reduced:
            raise NotAffine("the reduction after a product is not over its columns")
        if set(self.builder.extents) != {atom for atom, _ in (*images, *rows)} | set(self.reduced):
            raise NotAffine("the reduced value repeats elements of a product")
        return images, rows


def by_rows(statements: Sequence[Statement], images: Digits, rows: Digits, pointer: Pointer) -> list[Statement]:
    """``statements`` without their loops over images and rows, in one loop over the rows of a block."""
    outer = {atom for atom, _ in (*images, *rows)}
    body = (*taken_apart("row", rows), pointer, *_peeled(statements, outer))
    return [*taken_apart("image", images), For("row", 0, body, bounds=OF_BLOCK)]


def _peeled(statements: Sequence[Statement], atoms: Collection[str]) -> Iterator[Statement]:
    for statement in statements:
        if isinstance(statement, For) and statement.atom in atoms:
            yield from _peeled(statement.body, atoms)
        else:
            yield statement
