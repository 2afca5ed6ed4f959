from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import fuse
from fuse.graph.function import Function

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 20
T = torch.tensor([0, 4, 2, 2, 1, 3])


@pytest.mark.parametrize(("reduction", "launches"), [("none", 1), ("sum", 2), ("mean", 2)])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_no_log_probabilities_are_written(fuses, reduction, launches, ignored):
    fuses(
        "CrossEntropy",
        lambda x, t: F.cross_entropy(x, t, reduction=reduction, ignore_index=ignored),
        X,
        T,
        launches=launches,
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
        launches=1 + (reduction == "mean"),
    )


def test_the_mean_of_nothing_is_eagers(fuses):
    fuses("CrossEntropy", lambda x, t: F.cross_entropy(x, t), X, torch.full((6,), -100), launches=2)


@pytest.mark.parametrize("target", [5, -1])
def test_a_class_that_is_not_there_is_an_error_as_in_eager(target):
    fused = fuse.compile(Function(lambda x, t: F.cross_entropy(x, t)))
    with pytest.raises(IndexError):
        fused(X, T.clone().fill_(target))


@pytest.mark.parametrize(
    ("function", "x", "launches"),
    [
        (lambda x, t: F.cross_entropy(x, t, weight=torch.arange(5.0)), X, 2),
        (lambda x, t: F.cross_entropy(x, t), X.bfloat16(), 2),
        (lambda x, t: F.nll_loss(F.log_softmax(x, 0), t), X, 2),
        (lambda x, t: F.nll_loss(x, t), X, 1),
        (lambda x, t: (F.nll_loss(logs := F.log_softmax(x, 1), t), logs), X, 2),
    ],
    ids=["weights", "half precision", "another dimension", "no softmax", "read elsewhere"],
)
def test_near_misses_stay(fuses, function, x, launches):
    fuses("CrossEntropy", function, x, T, launches=launches, times=0)


def test_training_keeps_the_log_probabilities():
    fused = fuse.compile(Function(lambda x, t: F.cross_entropy(x, t)))
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    fused(x, T).backward()
    F.cross_entropy(y, T).backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_generated_calls_agree(verified):
    assert verified("CrossEntropy").fired >= 60
