"""Products of many rows are right with the vectors of any processor, and in whatever shares of threads."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from fuse.kernel.cpu.prelude import prelude, text_of_headers
from fuse.kernel.cpu.product_frame import ALIGNMENT, HEADERS
from fuse.kernel.cpu.tiled_products import ROWS_TOGETHER
from fuse.runtime.cpu import compiler, processor

SOURCE = """
extern "C" void product(float *out, const float *left, const float *right, char *workspace, int64_t rows,
                        int64_t columns, int64_t depth, int64_t threads, int64_t share, int64_t panels,
                        int64_t turned) {
    const fuse_matrix<float> matrix = {right, columns, 1, depth, columns};
    const auto store = [&](int64_t, int64_t first, int64_t last, int64_t column, int64_t end, const float *tile,
                           int64_t stride) {
        for (int64_t i = first; i < last; ++i) {
            for (int64_t j = column; j < end; ++j) out[i * columns + j] = tile[(i - first) * stride + j - column];
        }
    };
    if (turned) {
        const fuse_in_columns<float> given = {left, rows};
        fuse_tiled_product(fuse_panels_PANELS, given, matrix, rows, columns, depth, workspace, threads, share,
                           panels, store);
    } else {
        const fuse_in_rows<float> given = {left, depth};
        fuse_tiled_product(fuse_panels_PANELS, given, matrix, rows, columns, depth, workspace, threads, share, 0,
                           store);
    }
}
"""

NARROWER = [[], ["-mno-avx512f"], ["-mno-avx"]] if processor.is_x86() else [[]]


@pytest.mark.sampled
@pytest.mark.parametrize("flags", NARROWER, ids=lambda flags: flags[0] if flags else "native")
@pytest.mark.parametrize("panels", [1, 3, 4])
def test_products_are_right_with_any_vectors(flags: list[str], panels: int) -> None:
    text = prelude() + text_of_headers(HEADERS) + SOURCE.replace("PANELS", str(panels))
    library = compiler.build(text, flags=flags)
    for rows, columns, depth in ((1, 5, 3), (23, 70, 40), (130, 33, 1200), (300, 200, 7)):
        left, right, out = torch.randn(rows, depth), torch.randn(depth, columns), torch.empty(rows, columns)
        block, panel = depth * panels * 64, depth * ROWS_TOGETHER * 4
        for threads, (turned, held) in itertools.product((1, 3), ((0, 1), (1, 1), (1, 2))):
            workspace = torch.empty((block + panel) * held * threads + ALIGNMENT, dtype=torch.uint8)
            out.fill_(float("nan"))
            given = left.t().contiguous() if turned else left
            pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (out, given, right, workspace)]
            sizes = [ctypes.c_int64(n) for n in (rows, columns, depth, threads, block * held, panel * held, turned)]
            library.product(*pointers, *sizes)
            expected = left.double() @ right.double()
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6 * depth)
