"""Fixtures shared by the tests of building and running."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse.kernel import lower
from fuse.kernel.cpu import loop_kernel
from fuse.runtime.building import cache
from fuse.runtime.cpu import compiler, functions, toolchain
from fuse.runtime.sizes import patience


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache, with nothing loaded from another and no warning given yet."""
    home = tmp_path / "cache"
    monkeypatch.setenv("FUSE_CACHE_DIR", str(home))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for child processes, some of which are killed before they tidy up
    tables = ((compiler, "_loaded"), (functions, "_known"))
    for module, known in (*tables, (lower, "_KERNELS"), (lower, "_TEXTS"), (loop_kernel, "_TEXTS")):
        monkeypatch.setattr(module, known, {})  # as if no test had called anything before
    cache.warn_once.cache_clear()
    return home


@pytest.fixture
def compiled_sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that the C++ compiler is given from now on."""
    sources: list[str] = []
    original = toolchain.compile_in

    def counted(directory: Path, source: str, *rest: object) -> toolchain.CompilerRun:
        sources.append(source)
        return original(directory, source, *rest)

    monkeypatch.setattr(toolchain, "compile_in", counted)
    return sources


@pytest.fixture
def captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new size is captured and compiled at its first call, however many there are."""
    for several in ("SETTLED", "SETTLED_UNLIKE"):
        monkeypatch.setattr(patience, several, 1_000_000)
    monkeypatch.setattr(patience, "AT_ONCE", 1_000_000)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, which it does not where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
