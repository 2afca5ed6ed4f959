"""Nearest-neighbour upsampling as movement of elements, which the neighbouring kernels include."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse import ops
from fuse.rewrite.patterns.definition import Failure, Match
from fuse.rewrite.patterns.language import const, either
from fuse.rewrite.patterns.registry import pattern

FACTORS = (2, 4, 8)


@pattern
class NearestUpsample:
    """An image enlarged by repeating its elements.

    The replacement copies an expanded view. The copy becomes part of the kernel that reads it: the sum of a feature
    pyramid, an activation, the concatenation of a U-Net. This saves a launch; the enlarged image is never in memory.

    Declined for factors other than 2, 4 and 8: PyTorch computes the position that it reads in float32, which is exact
    for powers of two. Declined where only library calls read the result, because they need it in memory.

    Source: openvinotoolkit/openvino,
    src/common/transformations/src/transformations/common_optimizations/interpolate_sequence_fusion.cpp.
    """

    def pattern(self, x: Tensor) -> Any:
        return either(
            lambda: F.interpolate(x, scale_factor=const("factor", 2.0)),
            lambda: F.interpolate(x, size=const("size", (16, 16))),
            name="spelling",
        )

    def check(self, m: Match) -> Failure | None:
        height, width = m["x"].meta["val"].shape[-2:]
        size = tuple(m.outputs[0].meta["val"].shape[-2:])
        factor = m["factor"] if m["spelling"] == 0 else size[0] / max(height, 1)
        if factor not in FACTORS or size != (height * factor, width * factor):
            return m.fail("the factor is none of 2, 4 and 8", m.outputs[0])
        if all(ops.is_product(reader.target) for reader in m.outputs[0].users):
            return m.fail("only library calls read it", m.outputs[0])
        return None

    def replace(self, x: Tensor) -> Any:
        images, channels, height, width = x.shape
        rows, columns = either(
            lambda: (int(height * const("factor")), int(width * const("factor"))),
            lambda: const("size"),
            name="spelling",
        )
        repeated = (images, channels, height, rows // height, width, columns // width)
        return x[:, :, :, None, :, None].expand(repeated).reshape(images, channels, rows, columns)

    def examples(self) -> Any:
        return (torch.randn(1, 2, 8, 8),)
