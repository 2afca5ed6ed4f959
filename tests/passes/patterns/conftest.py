"""What the tests of the library share: what a pattern must make of a function of tensors, beside what is without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fuse.check.pattern import Verification, verify
from fuse.graph.function import Function
from fuse.report.report import Report
from fuse.rewrite.patterns import registry
from fuse.testing import assert_fuses


@pytest.fixture
def fuses() -> Callable[..., Report]:
    """``fuses(pattern, function, *arguments, launches=, times=1)``: it fires so often, and eager's values come."""

    def run(pattern: str, function: Callable[..., Any], *arguments: Any, launches: int, times: int = 1) -> Report:
        report = assert_fuses(Function(function), *arguments, launches=launches)
        counts = {one.pattern: one.count for one in report.fired if one.pattern}
        assert counts == ({pattern: times} if times else {}), str(report)
        return report

    return run


@pytest.fixture
def verified() -> Callable[[str], Verification]:
    """``verified(name)``: what trying the pattern on generated calls and near misses found."""

    def run(name: str) -> Verification:
        found = verify(registry.find(name))
        assert found.passed, str(found)
        return found

    return run
