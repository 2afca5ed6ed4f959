"""Services from higher layers that patterns use: tests of patterns, and a store for cached results.

    fuse/__init__.py   registers   fuse.check.trials (a Verifier)   and   fuse.runtime.building.cache (a DiskCache)

Matching uses both and imports neither. They are registered by module name, and imported at the first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from fuse.rewrite.patterns.call_classes import Trial
    from fuse.rewrite.patterns.definition import Pattern
    from fuse.rewrite.patterns.exact_match import FoundMatch


class Verifier(Protocol):
    """Tests patterns before they are used."""

    @property
    def refusal(self) -> Callable[[Pattern], str | None]:
        """Why a pattern must not be used in any call, or None."""

    @property
    def trial(self) -> Callable[[FoundMatch], Trial]:
        """The verdict on a pattern for calls of a match's class."""

    @property
    def gradient_trial(self) -> Callable[[FoundMatch], Trial]:
        """The verdict on a pattern's gradient rule for calls of a match's class."""


class DiskCache(Protocol):
    """Stores bytes on disk, by key."""

    @property
    def key_of(self) -> Callable[..., str]:
        """The key of a sequence of texts."""

    @property
    def find(self) -> Callable[[str, str], tuple[Path, bytes] | None]:
        """The path and content of a key; None if there is none."""

    @property
    def store(self) -> Callable[[str, bytes, str], Path]:
        """Store bytes under a key."""


_modules: dict[str, str] = {}


def register(*, verifier: str, disk_cache: str) -> None:
    """Set the modules that test patterns and store results."""
    _modules.update(verifier=verifier, disk_cache=disk_cache)


def verifier() -> Verifier:
    """The registered verifier."""
    return cast(Verifier, importlib.import_module(_modules["verifier"]))


def disk_cache() -> DiskCache:
    """The registered store."""
    return cast(DiskCache, importlib.import_module(_modules["disk_cache"]))
