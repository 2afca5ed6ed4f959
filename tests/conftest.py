"""What tests everywhere share."""

from __future__ import annotations

import gc
import os
from itertools import groupby
from zlib import crc32

# OpenMP's threads sleep while they wait: pytest's workers have more threads than there are processors, and a thread
# that spins takes the processor from the one it waits for. libgomp reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from fuse.kernel.nests import ranking
from fuse.rewrite.patterns import registry
from fuse.runtime.cpu import toolchain

# Modules and tests are a million objects that stay. Traversing them every hundred tests took a twentieth of the time.
gc.set_threshold(20_000, 10, 10)

# The compiler took half of the time of all tests. It optimises, as for users, where kernels themselves are tested: in
# these folders (those of the compiler's options among them), and in the files of passes whose kernels only they run.
OPTIMISED = ("kernel", "cpu", "tests", "test_convolution_gradients", "test_fuse_attention")


ONE_IN = 4
"""Of the cases of a test that is marked as ``sampled``, one in so many runs unless ``--all-cases`` is given."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="run every case of tests that are marked as sampled")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"sampled: its cases take long; one in {ONE_IN} runs, all with --all-cases")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect most cases of tests that are marked as ``sampled``, the same in each run. A test that the command line
    names runs with all of its cases."""
    if config.getoption("--all-cases") or any("::" in arg for arg in config.args):
        return
    left_out: set[pytest.Item] = set()
    marked = (item for item in items if item.get_closest_marker("sampled"))
    for _, cases in groupby(marked, lambda item: item.nodeid.partition("[")[0]):
        in_any_order = sorted(cases, key=lambda item: crc32(item.nodeid.encode()))
        left_out.update(in_any_order[-(-len(in_any_order) // ONE_IN) :])
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same numbers in every run: what fails, fails again."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes a millisecond, for other devices


@contextmanager
def without_optimising() -> Iterator[None]:
    """Kernels as quickly as they can be had. The linker does not read the library of C either, which took it a quarter
    of the time of a small kernel: the process has loaded it."""
    others = (option for option in toolchain.REQUIRED_OPTIONS if option != "-O2")
    libraries = tuple(library for library in toolchain._C_LIBRARIES if library != "-lc")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(toolchain, "REQUIRED_OPTIONS", (*others, "-O0"))
        patched.setattr(toolchain, "_C_LIBRARIES", libraries)
        yield


@pytest.fixture(autouse=True, scope="module")
def _built_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    optimised = {request.path.parent.name, request.path.stem} & {*OPTIMISED}
    with nullcontext() if optimised else without_optimising():
        yield


@pytest.fixture
def unoptimised() -> Iterator[None]:
    """For one of two tests that build much the same kernels."""
    with without_optimising():
        yield


@pytest.fixture
def alternately_optimised(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a test whose cases build much the same kernels: of two neighbours in their grid, one is not optimised."""
    with without_optimising() if _steps(request) % 2 else nullcontext():
        yield


@pytest.fixture
def seldom_optimised(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a test of whole models, whose kernels other tests build one by one: of five neighbours, one is optimised."""
    with without_optimising() if _steps(request) % 5 else nullcontext():
        yield


def _steps(request: pytest.FixtureRequest) -> int:
    """The steps from the first of the test's cases to this one, along all axes of their grid."""
    number = next(iter(request.node.callspec.indices.values()))  # among all cases
    steps = 0
    for axis in reversed([*request.node.iter_markers("parametrize")]):  # the one that varies fastest comes first
        number, step = divmod(number, len(axis.args[1]))
        steps += step
    return steps


@pytest.fixture
def unranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel ranks rows, so that ``sort`` and ``topk`` are operators without a kernel."""
    monkeypatch.setattr(ranking, "LONGEST_ROW", 0)


@pytest.fixture
def registered() -> Iterator[Callable[..., Any]]:
    """Registers patterns that are forgotten after the test."""
    before = {pattern.name for pattern in registry.registered()}
    yield registry.pattern
    for pattern in registry.registered():
        if pattern.name not in before:
            registry.unregister(pattern.name)
