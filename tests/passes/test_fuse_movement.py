from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fuse.graph.function import Function
from fuse.testing import assert_fuses

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def copied_to_another_layout(x):
    return (x * 2).t().contiguous() + 1


def padded(x):
    return F.pad(x * 3, (1, 2)).tanh()


def concatenated(x):
    return torch.cat([x * 2, x + 1], 1)


def stacked_costly_pieces(x):
    return torch.stack([x.tanh(), x.exp(), x.sigmoid()])


def rows_stacked(x):
    return torch.stack([row.tanh() for row in x.unbind(0)], 1)


def repeated(x):
    return (x + 1).repeat(2, 3) * 0.5


def flipped(x):
    return x.exp().flip(0) + x


def with_what_is_made_from_nothing(x):
    return torch.cat([x * 2, torch.zeros(4, 1), torch.ones(4, 2)], -1)


def whole_and_more(x):
    both = torch.cat([x[0], x[1]])
    return both, both * 2


FUSED = [
    copied_to_another_layout, padded, concatenated, stacked_costly_pieces, rows_stacked, repeated, flipped,
    with_what_is_made_from_nothing, whole_and_more,
]  # fmt: skip


@pytest.mark.parametrize("function", FUSED, ids=lambda f: f.__name__)
def test_a_copy_is_no_launch_of_its_own(function):
    assert_fuses(Function(function), X, launches=1)


def costly_pieces_read_whole(x):
    return torch.cat([x.tanh(), x.exp()]).sigmoid()


def a_product_between(x):
    return torch.cat([x, x @ torch.ones(6, 6)]) * 2


def nothing_to_copy(x):
    return torch.cat([x[:0].tanh(), x[:0]])


def partly_written(x):
    out = torch.zeros(4, 6)
    out[1] = x[0].tanh()
    out[2, 3:] = x[1, :3]
    return out


@pytest.mark.parametrize("function", [costly_pieces_read_whole, a_product_between, nothing_to_copy, partly_written])
def test_near_misses_are_right(function):
    assert_fuses(Function(function), X)


def test_costly_pieces_are_computed_once_where_the_whole_is_read():
    report = assert_fuses(Function(costly_pieces_read_whole), X)
    assert "a costly piece of a concatenation" in " ".join(rejected.reason for rejected in report.rejected)
