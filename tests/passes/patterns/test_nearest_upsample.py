from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

X, SKIP = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0)), torch.ones(2, 3, 10, 8)


@pytest.mark.parametrize("enlarged", [lambda x: F.interpolate(x, scale_factor=2), lambda x: F.interpolate(x, (10, 8))])
@pytest.mark.parametrize(
    "read",
    [lambda x, s: x + s, lambda x, s: torch.cat([s, x], 1), lambda x, s: torch.relu(x)],
    ids=["add", "cat", "relu"],
)
def test_an_enlarged_image_is_never_written(fuses, enlarged, read):
    fuses("NearestUpsample", lambda x, s: read(enlarged(x), s), X, SKIP, launches=1)


@pytest.mark.parametrize(("factor", "times"), [(2, 1), (4, 1), (8, 1), (1, 0), (3, 0), (16, 0), (1.5, 0)])
def test_only_factors_that_are_exact_will_do(fuses, factor, times):
    fuses("NearestUpsample", lambda x: F.interpolate(x, scale_factor=factor) + 1, X, launches=2 - times, times=times)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False) + 1,
        lambda x: F.interpolate(x, scale_factor=(2, 4)) + 1,
        lambda x: F.interpolate(x, (10, 16)) + 1,
        lambda x: F.interpolate(x, (11, 8)) + 1,
        lambda x: F.interpolate(x, scale_factor=2.1) + 1,
        lambda x: F.interpolate(x[0], scale_factor=2) + 1,
    ],
    ids=["bilinear", "two factors", "two sizes", "odd", "inexact", "a line"],
)
def test_near_misses_stay(fuses, function):
    fuses("NearestUpsample", function, X, launches=2, times=0)


def test_a_library_call_reads_it_in_memory(fuses):
    report = fuses(
        "NearestUpsample",
        lambda x, w: F.conv2d(F.interpolate(x, scale_factor=2), w),
        X,
        torch.ones(1, 3, 1, 1),
        launches=2,
        times=0,
    )
    assert [one.reason for one in report.rejected] == ["constraint: only library calls read it"]


def test_the_last_channel_first_keeps_its_strides(fuses):
    report = fuses(
        "NearestUpsample",
        lambda x: F.interpolate(x, scale_factor=2) + 1,
        X.to(memory_format=torch.channels_last),
        launches=2,
        times=0,
    )
    assert "strides" in report.rejected[0].reason


def test_generated_calls_agree(verified):
    assert verified("NearestUpsample").fired >= 40
