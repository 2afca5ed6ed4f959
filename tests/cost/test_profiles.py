"""Device profiles: looked up by name, and used to say what is small."""

from __future__ import annotations

import pytest
import torch

from fuse.cost import profiles
from fuse.errors import FuseError


@pytest.mark.parametrize("name", profiles.names())
def test_every_profile_says_where_its_numbers_come_from(name: str) -> None:
    profile = profiles.get(name)
    assert profile.source
    assert 1e-7 < profile.launch_seconds < 1e-4
    assert profile.flops_per_second[torch.float32] > profile.bytes_per_second / 4


def test_an_unknown_name_suggests_the_nearest() -> None:
    listed = r"there are cpu, v100, ascend910, h200; did you mean 'h200'\?"
    with pytest.raises(FuseError, match=f"no device profile 'h20'; {listed}"):
        profiles.get("h20")


def test_time_is_the_slower_of_arithmetic_and_traffic() -> None:
    v100 = profiles.get("v100")
    assert v100.seconds(flops=15_700_000, byte_count=9, dtype=torch.float32) == pytest.approx(1e-6)
    assert v100.seconds(flops=1, byte_count=900_000, dtype=torch.float32) == pytest.approx(1e-6)
    assert v100.seconds(flops=125_000_000, byte_count=9, dtype=torch.float16) == pytest.approx(1e-6)
    assert v100.seconds(flops=15_700_000, byte_count=9, dtype=torch.int64) == pytest.approx(1e-6)
