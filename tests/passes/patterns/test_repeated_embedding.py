from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

WORDS, SEGMENTS, POSITIONS = torch.tensor([[1, 4, 0], [2, 2, 3]]), torch.tensor([[0, 0, 1], [0, 1, 1]]), torch.arange(3)
TABLES = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)).unbind()
SCALE = torch.ones(8)


def bert(words, segments, positions, one, two, three, scale):
    x = F.embedding(words, one) + F.embedding(segments, two) + F.embedding(positions, three)
    return F.layer_norm(x, (8,), scale)


@pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[None]])
def test_embeddings_and_their_norm_are_one_kernel(fuses, positions):
    fuses("RepeatedEmbedding", bert, WORDS, SEGMENTS, positions, *TABLES, SCALE, launches=1)


def test_positions_in_front_are_found_too(fuses):
    def gpt(words, positions, one, two):
        return F.embedding(positions, two, padding_idx=0) + F.embedding(words, one)

    fuses("RepeatedEmbedding", gpt, WORDS, POSITIONS, *TABLES[:2], launches=1)


def test_a_row_that_is_not_there_is_an_error_as_in_eager():
    import fuse
    from fuse.graph.function import Function

    fused = fuse.compile(Function(lambda x, table, ids: x + F.embedding(ids, table)))
    with pytest.raises(IndexError):
        fused(torch.ones(2, 3, 8), TABLES[0], torch.tensor([0, 1, 5]))


def test_near_misses_stay(fuses):
    fuses("RepeatedEmbedding", bert, WORDS, SEGMENTS, WORDS, *TABLES, SCALE, launches=1, times=0)
    rest = torch.ones(2, 3, 8), TABLES[0], POSITIONS
    fuses("RepeatedEmbedding", lambda x, t, i: (x * F.embedding(i, t)).exp(), *rest, launches=2, times=0)
    fuses("RepeatedEmbedding", lambda x, t, i: (x + (e := F.embedding(i, t)), e), *rest, launches=2, times=0)


def test_generated_calls_agree(verified):
    assert verified("RepeatedEmbedding").fired >= 30
