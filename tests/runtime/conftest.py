"""Fixtures shared by the tests of building and running."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuse.runtime import cache, compiler


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache, with nothing loaded from another and no warning given yet."""
    home = tmp_path / "cache"
    monkeypatch.setenv("FUSE_CACHE_DIR", str(home))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for child processes, some of which are killed before they tidy up
    monkeypatch.setattr(compiler, "_loaded", {})
    cache.warn_once.cache_clear()
    return home
