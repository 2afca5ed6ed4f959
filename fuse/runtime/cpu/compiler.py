"""Compile C++ sources to libraries, through the cache, and load them.

    source -> key -> loaded before? -> in the cache? -> compile, publish -> load

A source that another thread compiles is waited for. Processes have no locks: those that build the same source at the
same time all compile it, and get equal libraries.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

from fuse.errors import CompileFailed
from fuse.runtime.building import cache
from fuse.runtime.building.compiling import begin_compiling, check_allowed
from fuse.runtime.building.interrupts import awaited, stopped_on_interrupt
from fuse.runtime.cpu import processor, toolchain
from fuse.runtime.cpu.toolchain import Toolchain

# Part of every key: raise it when libraries built before must not be used any more.
_FORMAT = "1"

_loaded: dict[str, ctypes.CDLL] = {}
_compiled_now: dict[str, Future[None]] = {}
"""Compilations that threads of this process have begun, by key; each is done whether it succeeded or not."""
os.register_at_fork(after_in_child=_compiled_now.clear)  # those threads are the parent's


def build(source: str, *, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile C++ with a plain C interface, or take it from the cache, and load it.

    Args:
        source: a whole translation unit with ``extern "C"`` functions. OpenMP is on if ``_OPENMP`` is defined; a
            compiler without OpenMP builds the same source to run serially.
        flags: further compiler options after the source (``-lm``, ``-DN=4``). Contents of files that they name are not
            part of the cache key.

    Returns:
        The library, which is never unloaded. Its functions use torch's OpenMP threads.

    Raises:
        CompilerMissing: there is no C++ compiler.
        CompileFailed: the compiler rejected the source, which is stored in a file named in the message, or exceeded its
            time limit; or the library could not be written or loaded.
        NotYet: it is not cached, and the caller does not allow compiling now (:mod:`fuse.runtime.building.compiling`).

    >>> build('extern "C" int twice(int x) { return 2 * x; }').twice(21)
    42
    """
    compiler = toolchain.find()
    options = (*toolchain.tuning_options(compiler), *flags)
    key = _key(source, compiler, options)
    if (library := _loaded.get(key)) is not None:
        return library
    if (entry := cache.find(key)) is not None:
        return _loaded.setdefault(key, _load(*entry))
    done: Future[None] = Future()
    if (another := _compiled_now.setdefault(key, done)) is not done:
        check_allowed()
        awaited(another)
        return build(source, flags=flags)  # loaded by now, unless the other thread failed or was interrupted
    try:
        if (library := _loaded.get(key)) is not None:  # another thread was done just before
            return library
        begin_compiling()
        content = _compiled(key, source, compiler, options)
        return _loaded.setdefault(key, _load(_stored(key, content), content))
    finally:
        _compiled_now.pop(key, None)
        done.set_result(None)


def build_many(sources: Sequence[str]) -> list[ctypes.CDLL]:
    """``build`` all sources, with one compiler per processor at a time; returns the libraries in order.

    Raises:
        CompilerMissing, CompileFailed: as ``build``, for the first source that cannot be built.

    >>> sources = ['extern "C" int one() { return 1; }', 'extern "C" int two() { return 2; }']
    >>> one, two = build_many(sources)
    >>> one.one(), two.two()
    (1, 2)
    """
    compiler = toolchain.find()
    options = toolchain.tuning_options(compiler)
    if all(_key(source, compiler, options) in _loaded for source in sources):
        return list(map(build, sources))
    with ThreadPoolExecutor(os.cpu_count()) as pool, stopped_on_interrupt():
        libraries = [pool.submit(copy_context().run, build, source) for source in sources]
        return [awaited(library) for library in libraries]


def built_by() -> tuple[str, ...]:
    """Everything that a library depends on besides its source, as a part of its cache key."""
    compiler = toolchain.find()
    return _maker(compiler, toolchain.tuning_options(compiler))


def _maker(compiler: Toolchain, options: Sequence[str]) -> tuple[str, ...]:
    place = (sys.platform, processor.features())
    options = (*toolchain.REQUIRED_OPTIONS, *options)
    return (_FORMAT, *place, *compiler.command, compiler.version, str(len(options)), *options)


def _key(source: str, compiler: Toolchain, options: Sequence[str]) -> str:
    return cache.key_of(*_maker(compiler, options), source)


def _compiled(key: str, source: str, compiler: Toolchain, options: Sequence[str]) -> bytes:
    """The bytes of the compiled library."""
    try:
        with tempfile.TemporaryDirectory(prefix="fuse-build-") as scratch:
            outcome = toolchain.compile_in(Path(scratch), source, compiler, options)
            if outcome.status == 0:
                return (Path(scratch) / toolchain.LIBRARY_NAME).read_bytes()
        kept = cache.keep_source(key, source)
    except OSError as error:
        raise _no_room(error) from error
    raise CompileFailed(f"{compiler.command[0]} failed: {outcome.first_error}; the source is {kept}")


def _stored(key: str, content: bytes) -> Path:
    try:
        return cache.store(key, content)
    except OSError as error:
        raise _no_room(error) from error


def _load(path: Path, content: bytes) -> ctypes.CDLL:
    """Load a library from ``path``, or from a copy if nothing may be executed from there."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        try:
            copy = _copied(content)
            library = ctypes.CDLL(copy)
        except OSError as again:
            raise CompileFailed(
                f"cannot load a built library: {again}; "
                f"set FUSE_CACHE_DIR or TMPDIR to a directory that programs may run from"
            ) from error
    cache.warn_once(
        f"kernel cache {path.parent.parent} cannot be loaded from (mounted noexec?): using copies in a temporary "
        f"directory; set FUSE_CACHE_DIR to a directory that programs may run from"
    )
    return library


def _copied(content: bytes) -> str:
    descriptor, path = tempfile.mkstemp(dir=cache.private_directory(), suffix=".so")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path


def _no_room(error: OSError) -> CompileFailed:
    place = error.filename or tempfile.gettempdir()
    return CompileFailed(f"cannot build in {place}: {error.strerror}; set TMPDIR to a directory with room")
