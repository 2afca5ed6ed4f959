"""What tests everywhere share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fuse.rewrite.patterns import registry


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same numbers in every run: what fails, fails again."""
    torch.manual_seed(0)


@pytest.fixture
def registered() -> Iterator[Callable[..., Any]]:
    """Registers patterns that are forgotten after the test."""
    before = {pattern.name for pattern in registry.registered()}
    yield registry.pattern
    for pattern in registry.registered():
        if pattern.name not in before:
            registry.unregister(pattern.name)
