"""Devices as three numbers: the time of a launch, the memory bandwidth, and the rate of arithmetic.

They tell which operators are *small* (predicted to run for less time than their launch takes), and how much of a call's
modelled time is launching. The numbers are peaks from data sheets, or measured where no data sheet exists: a modelled
time is not a measurement.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fuse.errors import FuseError


@dataclass(frozen=True)
class DeviceProfile:
    """One device. ``flops_per_second`` is by dtype; a dtype that is not named runs at float32's rate."""

    name: str
    launch_seconds: float
    bytes_per_second: float
    flops_per_second: Mapping[torch.dtype, float]
    source: str

    def seconds(self, flops: int, byte_count: int, dtype: torch.dtype) -> float:
        """Predicted device time of one kernel: the slower of its arithmetic and its memory traffic.

        >>> get("h200").seconds(flops=0, byte_count=4_800_000, dtype=torch.float32)
        1e-06
        """
        peak = self.flops_per_second.get(dtype, self.flops_per_second[torch.float32])
        return max(flops / peak, byte_count / self.bytes_per_second)

    def is_small(self, flops: int, byte_count: int, dtype: torch.dtype) -> bool:
        """Whether a kernel runs for less time than its launch takes.

        >>> get("v100").is_small(flops=1000, byte_count=12_000, dtype=torch.float32)
        True
        """
        return self.seconds(flops, byte_count, dtype) < self.launch_seconds


_PROFILES = (
    DeviceProfile(
        name="cpu",
        launch_seconds=1.2e-6,
        bytes_per_second=23e9,
        flops_per_second={torch.float32: 90e9, torch.float64: 36e9, torch.bfloat16: 135e9},
        source="measured on two AVX-512 server cores, torch 2.13: add of 16 elements, copy of 128 MiB, square products",
    ),
    DeviceProfile(
        name="v100",
        launch_seconds=5e-6,
        bytes_per_second=900e9,
        flops_per_second={torch.float32: 15.7e12, torch.float64: 7.8e12, torch.float16: 125e12},
        source="NVIDIA V100 data sheet, SXM2, 2020; launch: usual time of an empty kernel from a host thread",
    ),
    DeviceProfile(
        name="ascend910",
        launch_seconds=14e-6,
        bytes_per_second=1.2e12,
        flops_per_second={torch.float32: 4e12, torch.float16: 256e12, torch.int8: 512e12},
        source="Liao et al., Hot Chips 2019 and HPCA 2021: 32 cores at 1 GHz, in float32 their vector units of 2,048 "
        "bits (64 lanes, 2 operations each); launch: fixed time of the study's training steps over launches of such "
        "models (docs/study.md)",
    ),
    DeviceProfile(
        name="h200",
        launch_seconds=4e-6,
        bytes_per_second=4.8e12,
        flops_per_second={
            torch.float32: 67e12,
            torch.float64: 34e12,
            torch.float16: 989e12,
            torch.bfloat16: 989e12,
            torch.int8: 1979e12,
        },
        source="NVIDIA H200 data sheet, SXM, dense, 2024; launch: usual time of an empty kernel from a host thread",
    ),
)

DEFAULT = _PROFILES[0].name


def of_device(device: str) -> DeviceProfile:
    """The profile of a device type; the host's for a type without one.

    >>> of_device("cpu").name, of_device("meta").name
    ('cpu', 'cpu')
    """
    return next((profile for profile in _PROFILES if profile.name == device), _PROFILES[0])


def get(name: str) -> DeviceProfile:
    """The profile of that name.

    Raises:
        FuseError: no such profile; the message lists those there are and suggests the nearest.

    >>> get("cpu").name
    'cpu'
    """
    for profile in _PROFILES:
        if profile.name == name:
            return profile
    nearest = difflib.get_close_matches(name, names(), n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise FuseError(f"no device profile {name!r}; there are {', '.join(names())}{hint}")


def names() -> tuple[str, ...]:
    """Names of all profiles.

    >>> names()
    ('cpu', 'v100', 'ascend910', 'h200')
    """
    return tuple(profile.name for profile in _PROFILES)
