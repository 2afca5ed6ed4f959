from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuse
from fuse.testing import assert_fuses

Spelling = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
HEADS = 4


class Attention(nn.Module):
    """One spelling of attention on (batch, time, heads * width), as a module."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = spelling

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return self.spelling(q, k, v, mask)


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return joined((heads(q) @ heads(k).transpose(-1, -2)).softmax(-1) @ heads(v))


def additive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(heads(q), heads(k).transpose(-1, -2)) / math.sqrt(q.shape[-1] // HEADS)
    scores = scores + (1.0 - mask[:, None, None, :].to(q.dtype)) * -10000.0
    return joined(torch.matmul(torch.softmax(scores, dim=-1), heads(v)))


def masked_fill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (heads(q) * 0.25) @ heads(k).mT
    scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
    return joined(scores.softmax(-1) @ heads(v))


def where(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.where(mask[:, None, None, :].bool(), heads(q) @ heads(k).mT, -1e9) * 0.3
    return joined(scores.softmax(-1) @ heads(v))


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.view(*x.shape[:2], HEADS, -1) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.125 + torch.log(mask[:, None, None, :].float())
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    scores = ((heads(q) @ heads(k).mT) / 2.5).masked_fill(later, float("-inf"))
    return joined(scores.softmax(-1) @ heads(v))


def batches_of_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As in ``multi_head_attention_forward``: time first, heads folded into the batch, the mask added by baddbmm."""
    batch, time, width = q.shape[0], q.shape[1], q.shape[2] // HEADS
    q, k, v = (x.transpose(0, 1).reshape(-1, batch * HEADS, width).transpose(0, 1) for x in (q, k, v))
    bias = (mask.float() - 1).mul(5.0)[:, None, None, :].expand(-1, HEADS, time, -1).reshape(batch * HEADS, time, -1)
    weights = torch.softmax(torch.baddbmm(bias, q * width**-0.5, k.transpose(-2, -1)), dim=-1)
    return torch.bmm(weights, v).transpose(0, 1).reshape(time, batch, -1).transpose(0, 1)


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).mT * 0.2
    powers = torch.exp(scores - scores.amax(-1, keepdim=True)) * mask[:, None, None, :]
    return joined((powers / powers.sum(-1, keepdim=True)) @ heads(v))


def in_double(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).mT
    return joined(scores.softmax(-1, dtype=torch.float64).to(q.dtype) @ heads(v))


def heads_last(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The heads lie side by side: rows of a head are not contiguous."""
    q, k, v = (x.view(*x.shape[:2], -1, HEADS).permute(0, 3, 1, 2) for x in (q, k, v))
    return (((q @ k.mT) * 0.2).softmax(-1) @ v).permute(0, 2, 3, 1).flatten(2)


SPELLINGS = [
    plain, additive, masked_fill, where, einsum, causal, batches_of_heads, written_out, in_double, heads_last,
]  # fmt: skip


def operands(batch: int = 2, queries: int = 9, keys: int = 9, width: int = 8) -> list[Tensor]:
    """Queries, keys, values and a mask in which each row but the first wants its last third hidden."""
    mask = torch.ones(batch, keys, dtype=torch.int64)
    mask[1:, keys - keys // 3 :] = 0
    return [torch.randn(batch, length, HEADS * width) for length in (queries, keys, keys)] + [mask]


@pytest.mark.sampled
@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_one_launch(spelling: Spelling, batch: int) -> None:
    expected = 2 if spelling in (einsum,) else 1  # a logarithm of the mask is not computed again for every query
    assert_fuses(Attention(spelling), *operands(batch), launches=expected, fired={"fuse_attention": 1})


@pytest.mark.sampled
@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize("spelling", [additive, masked_fill, where, einsum, written_out])
@pytest.mark.parametrize(("queries", "keys"), [(1, 7), (2, 33), (5, 16), (40, 3), (17, 200)])
def test_queries_and_keys_of_different_lengths(spelling: Spelling, queries: int, keys: int) -> None:
    assert_fuses(Attention(spelling), *operands(2, queries, keys), fired={"fuse_attention": 1})


def test_threads_share_images_and_rows() -> None:
    assert_fuses(Attention(additive), *operands(1, 150, 130, 48), launches=1)
    assert_fuses(Attention(additive), *operands(3, 70, 64, 64), launches=1)


def test_doubles() -> None:
    q, k, v, mask = operands()
    assert_fuses(Attention(additive), q.double(), k.double(), v.double(), mask, launches=1)


# ---- values ----------------------------------------------------------------------------------------------------------


class Hidden(nn.Module):
    """Keys are hidden from queries by ``-inf``, wherever ``hidden`` says so."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def test_a_query_without_any_key_is_nan() -> None:
    hidden = torch.zeros(2, 3, 6, 7, dtype=torch.bool)
    hidden[1, 2, 4] = True
    q, k, v = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    assert_fuses(Hidden(), q, k, v, hidden, launches=1)
    result = fuse.compile(Hidden())(q, k, v, hidden)
    assert result[1, 2, 4].isnan().all()
    assert int(result.isnan().sum()) == 8


@pytest.mark.usefixtures("alternately_optimised")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_what_is_no_number_stays_so(operand: int, value: float) -> None:
    tensors = [torch.randn(2, 3, n, 8) for n in (6, 18, 18)]
    tensors[operand][1, 2, 4, 5] = value
    assert_fuses(Hidden(), *tensors, torch.rand(2, 1, 6, 18) > 0.7, launches=1)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (torch.randn(2, 3, 6, 8) * 100 for _ in range(3))
    assert_fuses(Hidden(), q, k, v, torch.zeros(6, 6, dtype=torch.bool), launches=1)


@pytest.mark.usefixtures("unoptimised")
@settings(max_examples=8, deadline=None)
@given(
    batch=st.integers(1, 2),
    queries=st.integers(1, 20),
    keys=st.integers(2, 40),
    depth=st.integers(1, 20),
    columns=st.integers(2, 40),
    mask=st.tuples(*[st.booleans()] * 4),
    orders=st.tuples(*[st.permutations(range(4))] * 3),
    seed=st.integers(0, 1000),
)
def test_any_shape_layout_and_mask(
    batch: int,
    queries: int,
    keys: int,
    depth: int,
    columns: int,
    mask: tuple[bool, ...],
    orders: tuple[list[int], ...],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    shapes = (batch, 3, queries, depth), (batch, 3, keys, depth), (batch, 3, keys, columns)
    tensors = []
    for shape, order in zip(shapes, orders, strict=True):
        back = [order.index(d) for d in range(4)]
        tensors.append(torch.randn([shape[d] for d in order]).permute(back))
    whole = (batch, 3, queries, keys)
    hidden = torch.rand([extent if kept else 1 for extent, kept in zip(whole, mask, strict=True)]) > 0.6
    assert_fuses(Hidden(), *tensors, hidden, launches=1)


# ---- near misses -----------------------------------------------------------------------------------------------------


class ScoresReturned(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT
        return scores.softmax(-1) @ v, scores


class ProbabilitiesReturned(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = (q @ k.mT).softmax(-1)
        return probabilities @ v, probabilities.mT


class ProbabilitiesSummed(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        probabilities = (q @ k.mT).softmax(-1)
        return (probabilities @ v).sum(-1) + probabilities.cumsum(-1)[..., 0]


class SoftmaxOverQueries(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-2) @ v


class SoftmaxOfValuesToo(nn.Module):
    """The right operand of the second product is made of the scores as well."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores.softmax(-1) @ torch.tanh(scores.mT)


class ScoresTurned(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return (scores + scores.mT).softmax(-1) @ v


class ScoresOverwritten(nn.Module):
    """The caller's tensor holds the scores, and sees the softmax written into it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        out.copy_(q @ k.mT)
        out.mul_(0.5)
        return out.softmax(-1) @ v


class TwoProducts(nn.Module):
    """No softmax: the product of three matrices."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.relu(q @ k.mT) @ v


@pytest.mark.parametrize(
    ("model", "declined"),
    [
        (ScoresReturned(), 1),
        (ProbabilitiesReturned(), 1),
        (ProbabilitiesSummed(), 1),
        (SoftmaxOverQueries(), 1),
        (SoftmaxOfValuesToo(), 1),
        (ScoresTurned(), 1),
        (TwoProducts(), 0),
    ],
)
def test_near_misses_stay(model: nn.Module, declined: int) -> None:
    tensors = [torch.randn(2, 3, 6, 8) for _ in range(3)]
    assert_fuses(model, *tensors, fired={"fuse_attention": 0}, rejected={"fuse_attention": declined})


class RelativePositions(nn.Module):
    """Scores by the distance of positions: a product of all heads for each row, where the second is of all rows for
    each head (arXiv:1803.02155)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, distances: Tensor) -> Tensor:
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.25
        scores = scores + torch.einsum("bhid,ijd->bhij", q, distances) * 0.25
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("heads", "rows"), [(4, 6), (6, 6), (6, 4)])
def test_products_that_go_through_heads_and_rows_in_other_orders_stay_apart(heads: int, rows: int) -> None:
    q, k, v = (torch.randn(1, heads, rows, 8) for _ in range(3))
    assert_fuses(RelativePositions(), q, k, v, torch.randn(rows, rows, 8), fired={"fuse_attention": 0})


def test_scores_that_are_written_to_the_callers_tensor_stay() -> None:
    q, k, v = (torch.randn(2, 6, 8) for _ in range(3))
    assert_fuses(ScoresOverwritten(), q, k, v, torch.empty(2, 6, 6), fired={"fuse_attention": 0})


def test_half_types_are_left_to_the_library() -> None:
    q, k, v = (torch.randn(2, 3, 6, 8).bfloat16() for _ in range(3))
    hidden = torch.zeros(6, 6, dtype=torch.bool)
    assert_fuses(Hidden(), q, k, v, hidden, fired={"fuse_attention": 0}, rejected={"fuse_attention": 1})


def test_halves_that_are_widened_first_are_not_read_where_they_lie() -> None:
    class Widened(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.softmax(q.float() @ k.float().mT, -1) @ v.float()

    q, k, v = (torch.randn(2, 6, 8).bfloat16() for _ in range(3))
    assert_fuses(Widened(), q, k, v, fired={"fuse_attention": 1})


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_nothing_to_attend(queries: int, keys: int) -> None:
    q, k, v = torch.randn(2, 3, queries, 8), torch.randn(2, 3, keys, 8), torch.randn(2, 3, keys, 8)
    assert_fuses(Hidden(), q, k, v, torch.zeros(queries, keys, dtype=torch.bool), fired={"fuse_attention": 0})


def test_one_query_of_many_keys_stays() -> None:
    q, k, v = torch.randn(1, 12, 1, 64), torch.randn(1, 12, 128, 64), torch.randn(1, 12, 128, 64)
    hidden = torch.zeros(1, 128, dtype=torch.bool)
    assert_fuses(Hidden(), q, k, v, hidden, fired={"fuse_attention": 0}, rejected={"fuse_attention": 1})


def test_dropout_in_training_keeps_its_random_numbers() -> None:
    class Dropped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.dropout((q @ k.mT).softmax(-1), 0.5, self.training) @ v

    tensors = [torch.randn(2, 3, 6, 8) for _ in range(3)]
    assert_fuses(Dropped().train(), *tensors, fired={"fuse_attention": 0}, rejected={"fuse_attention": 1})
    assert_fuses(Dropped().eval(), *tensors, launches=1)


# ---- attention as one operator of ATen's -----------------------------------------------------------------------------


class Scaled(nn.Module):
    """``F.scaled_dot_product_attention`` with these options."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def three(queries: int = 9, keys: int = 18, batch: int = 2, heads: int = HEADS) -> list[Tensor]:
    return [torch.randn(batch, heads, length, 8) for length in (queries, keys, keys)]


MASKS = {
    "none": None,
    "bool": torch.rand(9, 18) > 0.4,
    "bool for each batch": torch.rand(2, 1, 1, 18) > 0.4,
    "added": torch.randn(2, HEADS, 9, 18),
    "added to all": torch.randn(9, 18),
}


@pytest.mark.parametrize("mask", MASKS)
def test_the_operator_is_one_launch_with_its_mask(mask: str) -> None:
    given_mask = [] if MASKS[mask] is None else [MASKS[mask]]
    assert_fuses(Scaled(), *three(), *given_mask, launches=1, fired={"fuse_attention": 1})


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"scale": 0.0}, {"enable_gqa": True}])
def test_the_operators_options(options: dict[str, object]) -> None:
    q, k, v = three()
    if "enable_gqa" in options:
        k, v = k[:, :2], v[:, :2]
    assert_fuses(Scaled(**options), q, k, v, launches=1, fired={"fuse_attention": 1})


@pytest.mark.parametrize("dims", [2, 3])
def test_the_operator_on_fewer_dimensions_is_written_out(dims: int) -> None:
    q, k, v = (x[0, 0] if dims == 2 else x[0] for x in three())
    mask = torch.rand(9, 18) > 0.6
    mask[4] = False
    assert_fuses(Scaled(), q, k, v, mask, fired={"fuse_attention": 1})


def test_a_query_that_sees_no_key_gets_zeros_from_the_operator() -> None:
    q, k, v = three(keys=32)
    mask = torch.rand(2, 1, 9, 32) > 0.5
    mask[1, 0, 4] = False
    assert_fuses(Scaled(), q, k, v, mask, launches=1)
    assert not fuse.compile(Scaled())(q, k, v, mask)[1, :, 4].any()


@pytest.mark.sampled
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_what_is_no_number_stays_so_in_the_operator(operand: int, value: float) -> None:
    tensors = three()
    tensors[operand][1, 2, 4, 5] = value
    mask = torch.rand(2, 1, 9, 18) > 0.5
    mask[1, 0, 3] = False
    assert_fuses(Scaled(), *tensors, mask, launches=1)


def test_layouts_around_the_operator_are_read_and_stored_in_place() -> None:
    class Projected(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return joined(F.scaled_dot_product_attention(heads(q), heads(k), heads(v)))

    assert_fuses(Projected(), *operands(2, 9, 18)[:3], launches=1, fired={"fuse_attention": 1})


def test_multi_head_attention_is_products_and_one_kernel() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Tensor, padded: Tensor) -> Tensor:
            return self.inner(x, x, x, key_padding_mask=padded, need_weights=False)[0]

    padded = torch.zeros(2, 9, dtype=torch.bool)
    padded[1, 6:] = True
    # in training, which takes no fast path; nothing is dropped
    with torch.no_grad():
        assert_fuses(Attends().train(), torch.randn(2, 9, 32), padded, fired={"fuse_attention": 1})


@pytest.mark.parametrize("options", [{"is_causal": True}, {"dropout_p": 0.5}])
def test_the_operator_stays_where_it_leaves_out_keys_or_draws(options: dict[str, object]) -> None:
    assert_fuses(Scaled(**options), *three(18, 18), fired={"fuse_attention": 0})


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keys", [2, 3, 4, 5, 7, 8, 15, 16, 17])
def test_rows_of_nan_and_without_keys_are_as_in_the_operator(keys: int, dtype: torch.dtype) -> None:
    """Over fewer keys than a vector of ATen's has, a row of NaN gives zeros; with a mask it does not."""
    q, k, v = (x.to(dtype) for x in three(keys=keys))
    q[0, 0, 0] = float("nan")
    k[0, 1, keys // 2] = float("nan")
    k[1, 0] = -torch.inf
    q[1, 0, 0] = 1
    assert_fuses(Scaled(), q, k, v, fired={"fuse_attention": 1})
    assert_fuses(Scaled(), q, k, v, torch.zeros(9, keys, dtype=dtype), fired={"fuse_attention": 1})


def test_the_operator_stays_where_a_gradient_wants_its_sums() -> None:
    tensors = [x.requires_grad_() for x in three()]
    fused = fuse.compile(Scaled())
    found = torch.autograd.grad(fused(*tensors).sum(), tensors)
    for one, other in zip(found, torch.autograd.grad(Scaled()(*tensors).sum(), tensors), strict=True):
        torch.testing.assert_close(one, other)
    assert not fused.last_run.fallbacks


# ---- gradients, loops, neighbours ------------------------------------------------------------------------------------


def test_gradients_are_eagers() -> None:
    """The probabilities are saved for the backward pass, so the products stay apart."""
    tensors = [torch.randn(2, 9, 32, requires_grad=True) for _ in range(3)]
    mask = torch.ones(2, 9)
    fused = fuse.compile(Attention(additive))
    fused(*tensors, mask).square().sum().backward()
    found = [tensor.grad for tensor in tensors]
    assert not fused.last_run.fallbacks
    for tensor in tensors:
        tensor.grad = None
    Attention(additive)(*tensors, mask).square().sum().backward()
    torch.testing.assert_close(found, [tensor.grad for tensor in tensors])


def test_heads_of_one_merged_product_are_read_in_place() -> None:
    class Merged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.output = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).view(*x.shape[:2], 3, HEADS, 8).permute(2, 0, 3, 1, 4)
            return self.output(joined((q @ k.mT * 8**-0.5).softmax(-1) @ v))

    assert_fuses(Merged(), torch.randn(2, 9, 32), launches=3, fired={"fuse_attention": 1})


def test_groups_of_heads_share_keys_and_values() -> None:
    class Grouped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, 7, 8) for x in (k, v))
            return (q @ k.mT).softmax(-1) @ v

    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    assert_fuses(Grouped(), q, k, v, launches=1, fired={"fuse_attention": 1})


def test_one_head_without_a_batch() -> None:
    class Single(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.t() / 3).softmax(-1) @ v

    assert_fuses(Single(), torch.randn(9, 8), torch.randn(11, 8), torch.randn(11, 20), launches=1)


def test_a_mask_that_several_layers_read_is_made_once() -> None:
    class Layers(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for _ in range(3):
                x = additive(x, x, x, mask) + x
            return x

    assert_fuses(Layers(), torch.randn(2, 9, 32), torch.ones(2, 9, dtype=torch.int64), fired={"fuse_attention": 3})


def test_a_layer_norm_between_products_is_no_attention() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).eval()
    assert_fuses(layers, torch.randn(5, 8), fired={"fuse_attention": 0}, rejected={"fuse_attention": 0})


def test_a_product_behind_keeps_its_own_launch() -> None:
    class Weighted(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
            return torch.relu(joined((heads(q) @ heads(k).mT).softmax(-1) @ heads(v)).view(-1, 32) @ w)

    q, k, v, _ = operands()
    assert_fuses(Weighted(), q, k, v, torch.randn(32, 16), launches=2)


def test_large_attention_in_a_loop_is_a_kernel_of_its_own_step_by_step() -> None:
    """In the kernel of the loop such products would be plain sums, and slower."""

    class Layers(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            for _ in range(5):
                x = torch.tanh(joined((heads(x) @ heads(x).mT / 8).softmax(-1) @ heads(x)) @ w)
            return x

    report = assert_fuses(Layers(), torch.randn(1, 160, 128), torch.randn(128, 128) / 12, fired={"fuse_attention": 1})
    assert report.after.launches <= 2 * 5 + 1
