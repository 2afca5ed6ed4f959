"""Packing: the layout of the right operand of a product, in panels of columns and blocks of panels.

matrix [depth, 80]      panels of 16 columns      blocks of 3 panels: [2, depth, 48], the last one padded
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Packing:
    """The packing of a target.

    ``panel``: columns of a panel. ``most_panels``: most panels of a block, which are multiplied together.
    ``largest_block``: bytes of the largest block that stays in cache while all rows are multiplied by it.
    """

    panel: int
    most_panels: int
    largest_block: int

    def panels_in_block(self, columns: int) -> int:
        """Panels in a block: as many as possible while padding adds at most 30 % to the panels.

        >>> [Packing(16, 4, 1 << 19).panels_in_block(n) for n in (16, 80, 128, 400)]
        [1, 3, 4, 4]
        """
        panels = -(-columns // self.panel)
        return min(range(1, self.most_panels + 1), key=lambda n: (-(-panels // n) * n / panels > 1.3, -n))

    def padded(self, columns: int) -> int:
        """Columns of a product's result, with padding to whole blocks.

        >>> Packing(16, 4, 1 << 19).padded(5), Packing(16, 4, 1 << 19).padded(128)
        (16, 128)
        """
        width = self.panel * self.panels_in_block(columns)
        return -(-columns // width) * width

    def whole_blocks(self, depth: int, columns: int, itemsize: int) -> int | None:
        """Columns of the widest block that divides ``columns`` and fits the cache; None if panels do not divide them.

        >>> Packing(16, 4, 1 << 19).whole_blocks(512, 96, 4), Packing(16, 4, 1 << 19).whole_blocks(512, 40, 4)
        (48, None)
        """
        if columns % self.panel:
            return None
        widths = [n * self.panel for n in range(1, self.most_panels + 1) if columns % (n * self.panel) == 0]
        return max(w for w in widths if w == self.panel or depth * w * itemsize <= self.largest_block)
