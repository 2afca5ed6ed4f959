"""Row nests over a product's result: operators and reductions on whole rows of it in memory.

scores [image, row, column]     ->     for row in rows of a block:        stages of a row nest, see ``rows.py``
softmax(scores + mask, -1)                 scores = block + row * stride
                                           columns: largest, sum, store
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from fuse.kernel.arithmetic.index import ZERO, NotAffine
from fuse.kernel.cpu.product_frame import NAMES, OF_BLOCK
from fuse.kernel.cpu.tiled_products import atoms_of, delinearized, index_of_product
from fuse.kernel.ir import Buffer, For, Pointer, Statement
from fuse.kernel.nest import Sink
from fuse.kernel.nests.rows import RowNest
from fuse.kernel.values import Product, Reduce, Value

Atoms = Sequence[tuple[str, int]]
"""Loop variables of one dimension of a product, outermost first, each with its extent."""


class ProductRows(RowNest):
    """A row nest that reads rows of ``product`` from the memory ``scores``."""

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
        """Declare that a row of the product's result is in memory at ``scores``."""
        roots = [(reduction.source, self._source_index(reduction)) for reduction in self.reductions]
        self.product_index = (ZERO, *index_of_product(roots, self.product, self.builder.extents))[-3:]
        self.builder.used_names.update(dict.fromkeys(NAMES, 1))
        self.builder.stored[id(self.product)] = (
            self.scores,
            self.product_index[2],
            self.product_index[-len(self.product.shape) :],
        )

    def in_order_of(self, value: Value) -> bool:
        """Whether each element of ``value`` reads the product at its own image, row and column."""
        return (ZERO, *self._full_index(value))[-3:] == self.product_index

    def image_and_row(self) -> tuple[Atoms, Atoms]:
        """The loop variables of images and of rows.

        Raises:
            NotAffine: reductions do not run over the columns, or a value repeats elements of the product.
        """
        extents = (1, *self.product.shape)[-3:]
        images, rows, columns = map(atoms_of, self.product_index, extents, [self.builder.extents] * 3)
        if self.lane or [atom for atom, _ in columns] != self.reduced:
            raise NotAffine("the reduction after a product is not over its columns")
        if set(self.builder.extents) != {atom for atom, _ in (*images, *rows)} | set(self.reduced):
            raise NotAffine("the reduced value repeats elements of a product")
        return images, rows


def by_rows(statements: Sequence[Statement], images: Atoms, rows: Atoms, pointer: Pointer) -> list[Statement]:
    """``statements`` with their loops over images and rows replaced by one loop over the rows of a block."""
    outer = {atom for atom, _ in (*images, *rows)}
    body = (*delinearized("row", rows), pointer, *_peeled(statements, outer))
    return [*delinearized("image", images), For("row", 0, body, bounds=OF_BLOCK)]


def _peeled(statements: Sequence[Statement], atoms: Collection[str]) -> Iterator[Statement]:
    for statement in statements:
        if isinstance(statement, For) and statement.atom in atoms:
            yield from _peeled(statement.body, atoms)
        else:
            yield statement
