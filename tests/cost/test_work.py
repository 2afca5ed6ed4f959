"""Arithmetic and traffic of single calls, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fuse.cost.work import Work, bytes_of, work_of_call

aten = torch.ops.aten


def work(op: Any, *args: Any) -> Work:
    return work_of_call(op, args, {}, op(*args))


@pytest.mark.parametrize(
    ("op", "shapes", "flops"),
    [
        (aten.mm.default, [(4, 16), (16, 8)], 2 * 4 * 16 * 8),
        (aten.addmm.default, [(8,), (4, 16), (16, 8)], 2 * 4 * 16 * 8),
        (aten.bmm.default, [(5, 4, 16), (5, 16, 8)], 2 * 5 * 4 * 16 * 8),
        (aten.mv.default, [(4, 16), (16,)], 2 * 4 * 16),
        (aten.addmv.default, [(40,), (40, 3), (3,)], 2 * 40 * 3),
        (aten.dot.default, [(16,), (16,)], 2 * 16),
        (aten.addr.default, [(4, 8), (4,), (8,)], 2 * 4 * 8),
        (aten.addbmm.default, [(4, 8), (5, 4, 16), (5, 16, 8)], 2 * 5 * 4 * 16 * 8),
        (aten.add.Tensor, [(4, 8), (8,)], 4 * 8),
        (aten.tanh.default, [(4, 8)], 10 * 4 * 8),
        (aten.sum.default, [(4, 8)], 4 * 8),
        (aten.t.default, [(4, 8)], 0),
        (aten.clone.default, [(4, 8)], 0),
    ],
    ids=str,
)
def test_flops(op: Any, shapes: list[tuple[int, ...]], flops: int) -> None:
    assert work(op, *(torch.randn(shape) for shape in shapes)).flops == flops


def test_flops_of_convolution_and_attention() -> None:
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert (
        work(aten.convolution.default, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1).flops
        == 2 * 2 * 4 * 36 * 27
    )
    q = torch.randn(2, 4, 16, 8)
    for k in (q, q[:, :2]):  # two heads of keys serve two heads of queries each
        assert work(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, k).flops == 2 * 2 * (
            2 * 4 * 16 * 16 * 8
        )


def test_flops_of_a_whole_recurrent_layer() -> None:
    class Last(TorchDispatchMode):
        seen: Work | None = None

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is aten.mkldnn_rnn_layer.default:
                self.seen = work_of_call(func, args, kwargs or {}, result)
            return result

    with torch.no_grad(), Last() as last:
        torch.nn.LSTM(16, 8)(torch.randn(5, 2, 16))
    assert last.seen is not None
    assert last.seen.flops == 2 * (5 * 2) * (4 * 8 * 16 + 4 * 8 * 8)


def test_an_expanded_dimension_is_read_once() -> None:
    narrow, wide = torch.randn(8).expand(100, 8), torch.randn(100, 8)
    assert bytes_of(narrow) == 32
    assert work(aten.add.Tensor, narrow, wide).bytes == 4 * (8 + 800 + 800)


def test_the_same_argument_twice_is_read_once() -> None:
    x = torch.randn(100)
    assert work(aten.mul.Tensor, x, x).bytes == 4 * (100 + 100)


def test_a_look_up_reads_only_the_rows_it_returns() -> None:
    table, ids = torch.randn(30_000, 16), torch.tensor([1, 2, 3])
    assert work(aten.embedding.default, table, ids).bytes == 8 * 3 + 4 * (3 * 16) * 2


def test_what_is_overwritten_is_not_read() -> None:
    target, source = torch.randn(100), torch.randn(100)
    assert work(aten.copy_.default, target, source).bytes == 4 * (100 + 100)
    assert work(aten.zero_.default, target).bytes == 4 * 100
    assert work(aten.add_.Tensor, target, source).bytes == 4 * (100 + 100 + 100)


def test_tensors_without_strides_count_as_dense() -> None:
    sparse, dense = torch.eye(4).to_sparse(), torch.ones(4, 4)
    assert work(aten.mm.default, sparse, dense) == work(aten.mm.default, torch.eye(4), dense)


def test_the_same_work_on_meta_tensors() -> None:
    real = work(aten._softmax.default, torch.randn(4, 8), -1, False)
    assert work(aten._softmax.default, torch.randn(4, 8, device="meta"), -1, False) == real
    assert real.flops == 10 * 4 * 8
    assert F.softmax(torch.randn(4, 8), -1).dtype == real.dtype
