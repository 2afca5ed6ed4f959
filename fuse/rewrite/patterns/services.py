"""Services that the layers above pass to patterns: tests of patterns, and the store of cached results.

    fuse/__init__.py   hands over   fuse.check.trials (a Verifier)   and   fuse.runtime.cache (a DiskCache)

Matching asks both and imports neither. Modules are handed by name and imported when they are first asked.
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
    """Tries patterns before they are used."""

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
    """Keeps bytes on disk, by a key."""

    @property
    def key_of(self) -> Callable[..., str]:
        """The key of a sequence of texts."""

    @property
    def find(self) -> Callable[[str, str], tuple[Path, bytes] | None]:
        """The stored text of a key, with its path; None where there is none."""

    @property
    def store(self) -> Callable[[str, bytes, str], Path]:
        """Keep bytes under a key."""


_modules: dict[str, str] = {}


def register(*, verifier: str, disk_cache: str) -> None:
    """Say which modules try patterns and keep what is known of them."""
    _modules.update(verifier=verifier, disk_cache=disk_cache)


def verifier() -> Verifier:
    """Who tries patterns."""
    return cast(Verifier, importlib.import_module(_modules["verifier"]))


def disk_cache() -> DiskCache:
    """Where what is known of patterns is kept."""
    return cast(DiskCache, importlib.import_module(_modules["disk_cache"]))
