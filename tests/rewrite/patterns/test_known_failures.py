"""What other matchers are known to get wrong, each as a test: the graph must stay right, and what fits must fire."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

import fuse
from fuse.testing import assert_fuses


def fired(report: fuse.Report) -> int:
    return sum(one.count for one in report.fired if one.pattern)


def reasons(report: fuse.Report) -> list[str]:
    return [one.reason for one in report.rejected if one.pattern]


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.norm.running_mean += 0.5
        self.eval()


def test_adjacent_matches_in_one_list_of_a_cat(registered):
    """pytorch#159613: the list that both results stand in was corrupted."""

    @registered
    class Swish:
        def pattern(self, x):
            return x * torch.sigmoid(x)

        def replace(self, x):
            return F.silu(x)

    class Joined(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x * torch.sigmoid(x), y * torch.sigmoid(y), x, torch.sigmoid(x + y) * (x + y)], 1)

    assert fired(assert_fuses(Joined(), randn(3, 4), randn(3, 4))) == 3


def test_adjacent_matches_that_are_regions_in_one_list_of_a_cat(registered):
    @registered
    def swish(x):
        return x * torch.sigmoid(x)

    class Joined(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x * torch.sigmoid(x), y * torch.sigmoid(y)], 1)

    assert fired(assert_fuses(Joined(), randn(3, 4), randn(3, 4))) == 2


def test_a_convolution_with_batch_norm_on_one_path_only(registered):
    """Folding the norm into the weights would change the other path."""

    @registered(finite=True)
    class Folded:
        def pattern(self, x, w, b, mean, var, scale, shift):
            y = F.conv2d(x, w, b, padding=fuse.const("padding"))
            return F.batch_norm(y, mean, var, scale, shift, eps=fuse.const("eps"))

        def replace(self, x, w, b, mean, var, scale, shift):
            factor = scale * torch.rsqrt(var + fuse.const("eps"))
            bias = (b - mean) * factor + shift
            return F.conv2d(x, w * factor[:, None, None, None], bias, padding=fuse.const("padding"))

        def examples(self):
            return randn(1, 2, 8, 8), randn(4, 2, 3, 3), randn(4), randn(4), randn(4), randn(4), randn(4)

    class Shared(Conv):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.norm(y) + y.relu()

    class Single(Conv):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))

    report = assert_fuses(Shared(), randn(1, 2, 8, 8))
    assert (fired(report), reasons(report)) == (
        0,
        ["used outside: `convolution` is used outside: `relu` reads it, too"],
    )
    assert fired(assert_fuses(Single(), randn(1, 2, 8, 8), atol=1e-4)) == 1


def test_the_same_weights_of_a_convolution_used_twice(registered):
    @registered
    class Tail:
        def pattern(self, x, w, b):
            return torch.relu(F.conv2d(x, w, b, padding=fuse.const("padding")))

        def replace(self, x, w, b):
            return F.conv2d(x, w, b, padding=fuse.const("padding")).clamp(min=0)

    class Twice(Conv):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.relu(self.conv(x)) - self.conv(y)

    assert fired(assert_fuses(Twice(), randn(1, 2, 8, 8), randn(1, 2, 8, 8))) == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_several_results_keep_their_order(registered, swapped):
    @registered
    class Both:
        def pattern(self, x):
            e = torch.exp(x)
            s = torch.sin(e)
            return (s, e) if swapped else (e, s)

        def replace(self, x):
            e = torch.exp(x) * 1.0
            return (torch.sin(e), e) if swapped else (e, torch.sin(e))

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            e = torch.exp(x)
            s = torch.sin(e)
            return s - 1, e.t(), s

    assert fired(assert_fuses(Model(), randn(3, 4))) == 1


def test_keywords_are_not_dropped(registered):
    @registered
    class Plain:
        def pattern(self, x):
            return F.gelu(x).sum(-1)

        def replace(self, x):
            return F.gelu(x).sum(-1, keepdim=True).squeeze(-1)

    class Keywords(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            tanh = F.gelu(x, approximate="tanh").sum(-1)
            wide = F.gelu(x).sum(-1, dtype=torch.float64)
            return tanh, wide, F.gelu(input=x + 1, approximate="none").sum(dim=(1,))

    report = assert_fuses(Keywords(), randn(3, 4), atol=1e-6)  # float32 numbers in a float64 sum
    assert fired(report) == 1
    assert sorted(reasons(report)) == [
        "structure: `gelu` has approximate tanh, the pattern wants none",
        "structure: the graph has `cast` to float64[3, 4] where the pattern has none",
    ]


def test_a_permutation_is_not_taken_for_a_transposition(registered):
    @registered
    class Scores:
        def pattern(self, q, k):
            return torch.tanh(torch.exp(k.transpose(-2, -1)) + q)

        def replace(self, q, k):
            return torch.tanh(torch.exp(k).transpose(-2, -1) + q)

    class Turned(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return torch.tanh(torch.exp(k.permute(0, 2, 3, 1)) + q)

    class Transposed(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return torch.tanh(torch.exp(k.permute(0, 1, 3, 2)) + q)

    k = randn(2, 3, 3, 3)
    assert fired(assert_fuses(Turned(), randn(2, 3, 3, 3), k)) == 1  # k turned before: k.permute(0, 2, 1, 3)
    assert fired(assert_fuses(Transposed(), randn(2, 3, 3, 3), k)) == 1


def test_a_permutation_of_a_computed_value_is_not_taken_for_a_transposition(registered):
    @registered
    class Scores:
        def pattern(self, q, k):
            return torch.tanh(torch.exp(k).transpose(-2, -1) + q)

        def replace(self, q, k):
            return torch.tanh(torch.exp(k.transpose(-2, -1)) + q)

    class Turned(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return torch.tanh(torch.exp(k).permute(0, 2, 3, 1) + q)

    report = assert_fuses(Turned(), randn(2, 3, 3, 3), randn(2, 3, 3, 3))
    assert (fired(report), reasons(report)) == (
        0,
        ["structure: `permute` has dims [0, 2, 3, 1], the pattern wants [0, 1, 3, 2]"],
    )


@pytest.mark.parametrize(
    ("one", "other"), [(torch.bfloat16, torch.float32), (torch.int64, torch.float32), (torch.bool, torch.int64)]
)
def test_promoted_dtypes(registered, one, other):
    """The replacement casts one operand up first, which is right only where promotion does the same."""

    @registered
    class Sum:
        def pattern(self, x, y):
            return (x + y) * 2

        def replace(self, x, y):
            return (x + y) * 2.0

    class Mixed(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x + y) * 2

    x, y = torch.ones(3, 4).to(one), torch.ones(4).to(other)
    report = assert_fuses(Mixed(), x, y)
    if other.is_floating_point:
        assert fired(report) == 1
    else:
        assert reasons(report) == ["constraint: replace gives float32[3, 4], the pattern int64[3, 4]"]


def test_a_cast_in_between_is_not_lost(registered):
    @registered
    class Sum:
        def pattern(self, x, y):
            return torch.exp(x) + y

        def replace(self, x, y):
            return y + torch.exp(x)

    class Rounded(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.exp(x).to(torch.bfloat16) + y

    report = assert_fuses(Rounded(), randn(3), randn(3))
    assert (fired(report), reasons(report)) == (
        0,
        ["structure: the graph has `cast` to bfloat16[3] where the pattern has none"],
    )


@pytest.mark.parametrize(
    ("factors", "reason"),
    [
        ({}, None),
        ({"alpha": 2}, "no `add` here reads `matmul`"),
        ({"beta": 2}, "`addmm` has factors that the pattern does not have"),
        ({"alpha": 0.5, "beta": 0}, "no `relu` here reads `add`"),
    ],
)
def test_alpha_and_beta_of_addmm(registered, factors, reason):
    @registered
    class Linear:
        def pattern(self, x=fuse.tensor(dtype="T"), w=fuse.tensor(dtype="T"), b=fuse.tensor(dtype="T")):
            return torch.relu(x @ w + b)

        def replace(self, x, w, b):
            return torch.relu(torch.addmm(b, x, w))

    class Scaled(nn.Module):
        def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return torch.relu(torch.addmm(b, x, w, **factors))

    report = assert_fuses(Scaled(), randn(3, 4), randn(4, 5), randn(5))
    assert fired(report) == (not factors)
    assert reasons(report) == ([f"structure: {reason}"] if reason else [])


@pytest.mark.parametrize("second", [(4, 5), (1, 5), (4, 1)])
def test_broadcasting_in_a_sum_of_products(registered, second):
    """The products side by side as one: wrong unless both have the same shape."""

    @registered
    class SumOfProducts:
        def pattern(self, a, b, c, d):
            return a @ b + c @ d

        def replace(self, a, b, c, d):
            return torch.cat([a, c], 1) @ torch.cat([b, d], 0)

    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
            return a @ b + c @ d

    rows, columns = second
    report = assert_fuses(Sum(), randn(4, 3), randn(3, 5), randn(rows, 3), randn(3, columns))
    assert fired(report) == (second == (4, 5))
    if second != (4, 5):
        assert reasons(report)[0].startswith("constraint: replace does not run on these tensors")


def test_a_pattern_that_nothing_reads(registered):
    @registered
    def swish(x):
        return x * torch.sigmoid(x)

    class Unread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.sigmoid(x).mul(x)
            return x + 1

    assert_fuses(Unread(), randn(3))
    report = fuse.show(Unread(), (randn(3),), passes=["match_patterns"])
    assert reasons(report) == ["used outside: nothing reads the results"]


def test_a_result_that_nothing_reads(registered):
    @registered
    class Both:
        def pattern(self, x):
            e = torch.exp(x)
            return torch.sin(e), torch.cos(e)

        def replace(self, x):
            e = torch.exp(x)
            return e.sin(), e.cos()

    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            e = torch.exp(x)
            torch.cos(e)
            return torch.sin(e)

    report = fuse.show(One(), (randn(3),), passes=["match_patterns"])
    assert fired(report) == 1
    assert_fuses(One(), randn(3))


@pytest.mark.parametrize("replaced", [False, True])
def test_an_input_that_is_also_a_result(registered, replaced):
    class Kept:
        def pattern(self, x):
            return x, torch.sin(torch.exp(x))

    if replaced:
        Kept.replace = lambda self, x: (x, torch.exp(x).sin())
    registered(Kept)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = x * 2
            return y, torch.sin(torch.exp(y)), torch.sin(torch.exp(x)), x

    assert fired(assert_fuses(Model(), randn(3))) == 2


def test_an_input_that_is_a_result_is_no_reader_of_the_others(registered):
    @registered
    def kept(x):
        return x, torch.sin(torch.exp(x))

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.sin(torch.exp(x))
            return x * 2

    report = fuse.show(Model(), (randn(3),), passes=["match_patterns"])
    assert reasons(report) == ["used outside: nothing reads the results"]


def test_an_input_that_a_replacement_gives_as_another_result(registered):
    """relu(relu(x)) is relu(x), but the caller must not get one tensor twice."""

    @registered
    class Again:
        def pattern(self, x):
            return torch.abs(torch.abs(x))

        def replace(self, x):
            return torch.abs(x)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return torch.abs(torch.abs(x)), torch.abs(x)

    assert_fuses(Model(), randn(3))


def test_a_swapped_operand_still_fuses(registered):
    """pytorch#195782: a swapped operand silently unfused."""

    @registered
    def tail(x, scale, skip):
        return torch.relu(x * scale + skip)

    class Swapped(nn.Module):
        def forward(self, x: Tensor, scale: Tensor, skip: Tensor) -> Tensor:
            return torch.relu(skip + scale * x)

    assert fired(assert_fuses(Swapped(), randn(3, 4), randn(4), randn(3, 1))) == 1
