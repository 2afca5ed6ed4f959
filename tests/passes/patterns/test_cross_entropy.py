from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import fuse
from fuse.graph.function import Function

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 20
T = torch.tensor([0, 4, 2, 2, 1, 3])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_no_log_probabilities_are_written(fuses, reduction, ignored):
    fuses(
        "CrossEntropy",
        lambda x, t: F.cross_entropy(x, t, reduction=reduction, ignore_index=ignored),
        X,
        T,
        launches=1,
    )


def test_it_is_found_in_two_operators(fuses):
    fuses("CrossEntropy", lambda x, t: F.nll_loss(F.log_softmax(x, -1), t, reduction="none") * 2, X, T, launches=1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_infinities_and_nan_are_eagers(fuses, value, reduction):
    x = X.clone()
    x[1, 2], x[2, 2], x[3] = value, value, value
    fuses(
        "CrossEntropy",
        lambda x, t: F.cross_entropy(x, t, reduction=reduction),
        x,
        T,
        launches=1,
    )


def test_the_mean_of_nothing_is_eagers(fuses):
    fuses("CrossEntropy", lambda x, t: F.cross_entropy(x, t), X, torch.full((6,), -100), launches=1)


@pytest.mark.parametrize("target", [5, -1])
def test_a_class_that_is_not_there_is_an_error_as_in_eager(target):
    fused = fuse.compile(Function(lambda x, t: F.cross_entropy(x, t)))
    with pytest.raises(IndexError):
        fused(X, T.clone().fill_(target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_classes_are_weighted(fuses, reduction, dtype):
    weight = torch.tensor([0.5, 2, 0, 1, 3], dtype=dtype)
    fuses(
        "CrossEntropy",
        lambda x, t: F.cross_entropy(x, t, weight, reduction=reduction, ignore_index=3),
        X.to(dtype),
        T,
        launches=1,
    )


@pytest.mark.parametrize("behind", [(7,), (3, 4), (2, 3, 2)])
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"reduction": "sum", "weight": torch.arange(5.0)}])
def test_dimensions_may_stand_behind_the_classes(fuses, behind, options):
    fuses(
        "CrossEntropy",
        lambda x, t: F.cross_entropy(x, t, ignore_index=1, **options),
        torch.randn(2, 5, *behind),
        torch.randint(5, (2, *behind)),
        launches=1,
    )


def test_sequences_with_the_classes_last(fuses):
    logits, target = torch.randn(2, 7, 5), torch.randint(5, (2, 7))
    fuses("CrossEntropy", lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten()), logits, target, launches=1)
    report = fuses(
        "CrossEntropy", lambda x, t: F.cross_entropy(x.transpose(1, 2), t), logits, target, launches=2, times=0
    )
    assert "constraint: the classes are the second dimension and lie last in memory" in [
        one.reason for one in report.rejected
    ]


def test_many_losses_take_a_second_kernel(fuses):
    logits, target = torch.randn(4097, 3), torch.randint(3, (4097,))
    fuses("CrossEntropy", lambda x, t: F.cross_entropy(x, t), logits[:4096], target[:4096], launches=1)
    fuses("CrossEntropy", lambda x, t: F.cross_entropy(x, t), logits, target, launches=2)


def test_logits_that_are_converted_before(fuses):
    fuses("CrossEntropy", lambda x, t: F.cross_entropy(x.float(), t), X.half(), T, launches=2)


@pytest.mark.parametrize(
    ("function", "x", "launches", "reason"),
    [
        (lambda x, t: F.cross_entropy(x, t), X.half(), 2, "constraint: `logits` is float16, the pattern wants"),
        (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), X, 2, "used outside: `_log_softmax` is used outside"),
        (lambda x, t: F.nll_loss(F.log_softmax(x, 0), t), X, 2, "structure: `_log_softmax` has dim 0"),
        (lambda x, t: F.nll_loss(x, t), X, 1, ""),
        (
            lambda x, t: F.nll_loss(F.log_softmax(x, 1) * 2, t),
            X,
            2,
            "structure: no `nll_loss_forward` here reads `_log_softmax`",
        ),
        (
            lambda x, t: (F.nll_loss(y := F.log_softmax(x, 1), t), y),
            X,
            2,
            "used outside: `_log_softmax` is used outside",
        ),
        (lambda x, t: F.cross_entropy(x[0], t[0]), X, 2, "structure: the pattern does not run on these tensors"),
    ],
    ids=[
        "half precision",
        "smoothed labels",
        "another dimension",
        "no softmax",
        "a factor between",
        "read elsewhere",
        "one sample",
    ],
)
def test_near_misses_stay(fuses, function, x, launches, reason):
    report = fuses("CrossEntropy", function, x, T, launches=launches, times=0)
    reasons = [one.reason for one in report.rejected if one.pattern]
    assert len(reasons) == bool(reason)
    assert all(one.startswith(reason) for one in reasons), reasons


def test_classes_that_are_one_value_do_not_lie_last(fuses):
    x, target = X[:2, :1, None].expand(2, 1, 3).contiguous(), T[:6].reshape(2, 3)
    fuses("CrossEntropy", lambda x, t: F.cross_entropy(x.expand(2, 5, 3), t), x, target, launches=1)


def test_probabilities_are_another_loss(fuses):
    fuses("CrossEntropy", lambda x, p: F.cross_entropy(x, p), X, X.softmax(1), launches=2, times=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none", "ignore_index": 2},
        {"reduction": "sum", "weight": torch.tensor([0.5, 2, 0, 1, 3])},
        {"label_smoothing": 0.2, "ignore_index": 2},
    ],
    ids=["plain", "ignored", "weighted", "smoothed"],
)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((6, 5), torch.float32), ((2, 5, 3), torch.float32), ((6, 5), torch.half)]
)
def test_training_keeps_the_log_probabilities(options, shape, dtype):
    options = {key: one.to(dtype) if isinstance(one, torch.Tensor) else one for key, one in options.items()}
    fused = fuse.compile(Function(lambda x, t: F.cross_entropy(x, t, **options)))
    x = torch.randn(shape).to(dtype).requires_grad_()
    y, target = x.detach().clone().requires_grad_(), torch.randint(5, (shape[0], *shape[2:]))
    loss, wanted = fused(x, target), F.cross_entropy(y, target, **options)
    for one in (loss, wanted):
        one.sum().backward()
    rounding = {"rtol": 5e-3, "atol": 1e-3} if dtype == torch.half else {}
    torch.testing.assert_close(loss, wanted, **rounding)
    torch.testing.assert_close(x.grad, y.grad, **rounding)


def test_generated_calls_agree(verified):
    assert verified("CrossEntropy").fired >= 60
