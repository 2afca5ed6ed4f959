"""The on-disk cache of built libraries and measurements (``tuning.py``), shared by all processes of a user.

    <cache>/3f/3f9c...e1-77ab...20.so        key (SHA-256 of source and compiler) - checksum (SHA-256 of the file)

One rename publishes file and checksum together. So a reader finds a whole entry or none, and no lock file can be left
behind. Two builds of one key are both valid; the last rename wins. An entry whose content does not match its checksum
is removed and built again.

The directory must belong to the user and not be writable by others, because its libraries are executed. Otherwise, or
if it cannot be written, a private temporary directory replaces it until the process ends, with one warning.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

LIBRARY = ".so"
"""Suffix of built libraries."""

SIZE_LIMIT = 512 * 2**20
"""Most bytes in the cache; beyond, the least recently used files are removed. A library takes 15 to 130 KiB."""

_STORES_BETWEEN_SWEEPS = 64
"""A sweep looks at every file of the cache: too slow for every store."""
_ABANDONED_AFTER_SECONDS = 3600.0
"""Far longer than any file takes to be written: one that is older was left by a process that was killed."""
_UNPUBLISHED = ".unpublished-"
_OWN_NAME = re.compile(rf"[0-9a-f]{{64}}(-[0-9a-f]{{64}}\.(so|txt)|\.cpp)|{re.escape(_UNPUBLISHED)}\w+")

_stores = itertools.count()


def key_of(*parts: str) -> str:
    """The SHA-256, in hexadecimal, of a sequence of texts.

    The length of each text is hashed too, so that different sequences differ.

    >>> key_of("ab", "c") == key_of("a", "bc")
    False
    >>> len(key_of("ab", "c"))
    64
    """
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", errors="surrogateescape")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def location() -> Path:
    """The configured directory: ``$FUSE_CACHE_DIR``, else ``fuse`` in ``$XDG_CACHE_HOME``, else ``~/.cache/fuse``.

    For a user without a home directory, ``fuse-<uid>`` in the system's temporary directory.

    >>> location().is_absolute()
    True
    """
    if chosen := os.environ.get("FUSE_CACHE_DIR"):
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    # Relative paths are ignored, as the XDG specification asks; "~" stays as it is for a user without a home.
    for parent in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(parent):
            return Path(parent) / "fuse"
    return Path(tempfile.gettempdir()) / f"fuse-{os.geteuid()}"


def directory() -> Path:
    """The directory in use: ``location()``, created with mode 0700; the private one if that cannot be created or
    trusted.

    >>> objection(directory()) is None
    True
    """
    chosen = location()
    try:
        chosen.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            chosen.mkdir(mode=0o700)
        reason = objection(chosen)
    except OSError as error:
        reason = f"cannot be created ({error.strerror})"
    if reason is None:
        return chosen
    warn_once(
        f"kernel cache {chosen} {reason}: using a temporary directory; set FUSE_CACHE_DIR to a directory of your own"
    )
    return private_directory()


def objection(path: Path) -> str | None:
    """The reason why libraries in this directory must not be executed, or None.

    >>> objection(Path("/dev/null"))
    'is not a directory'
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    if status.st_uid != os.geteuid():
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def find(key: str, suffix: str = LIBRARY) -> tuple[Path, bytes] | None:
    """The path and content of an entry whose checksum matches, or None; removes entries whose checksum does not match.

    >>> find(key_of("never", "stored")) is None
    True
    """
    folder = directory() / key[:2]
    there = os.listdir(folder) if folder.is_dir() else ()
    for path in [folder / name for name in there if name.startswith(f"{key}-") and name.endswith(suffix)]:
        with contextlib.suppress(OSError):  # removed by another process, or unreadable
            content = path.read_bytes()
            if path.name == _entry_name(key, content, suffix):
                with contextlib.suppress(OSError):
                    os.utime(path)  # marks the entry as recently used; a read-only cache is never swept
                return path, content
            path.unlink()
    return None


def store(key: str, content: bytes, suffix: str = LIBRARY) -> Path:
    """Store a built library (or another file with ``suffix``) under its key; returns its path.

    If the cache cannot be written (read-only, disk full), the private directory is used, with one warning.

    Raises:
        OSError: the private directory cannot be written either.
    """
    home = directory()
    name = Path(key[:2]) / _entry_name(key, content, suffix)
    try:
        path = _publish(home / name, content)
    except OSError as error:
        warn_once(
            f"kernel cache {home} cannot be written ({error.strerror}): using a temporary directory, built anew by "
            f"every process; set FUSE_CACHE_DIR to a directory with room"
        )
        return _publish(private_directory() / name, content)
    if next(_stores) % _STORES_BETWEEN_SWEEPS == 0:
        sweep(home)
    return path


def keep_source(key: str, source: str) -> Path:
    """Store a source that did not compile for the user to read; returns its path.

    It is in the cache, where it counts towards ``SIZE_LIMIT``, or in the system's temporary directory if the cache is
    not usable.
    """
    content = source.encode("utf-8", errors="surrogateescape")
    home = directory()
    if home == location():
        with contextlib.suppress(OSError):
            return _publish(home / "failed" / f"{key}.cpp", content)
    descriptor, path = tempfile.mkstemp(prefix="fuse-failed-", suffix=".cpp")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return Path(path)


def sweep(home: Path, limit: int = SIZE_LIMIT) -> None:
    """Remove the least recently used files beyond ``limit`` bytes, and unfinished files of killed processes.

    Only files written by the cache are counted and removed. A process that has loaded a removed library goes on using
    it.
    """
    oldest_first = sorted(_files(home), key=lambda file: file[1].st_mtime)
    excess = sum(status.st_size for _, status in oldest_first) - limit
    now = time.time()
    for path, status in oldest_first:
        abandoned = path.name.startswith(_UNPUBLISHED) and now - status.st_mtime > _ABANDONED_AFTER_SECONDS
        if excess > 0 or abandoned:
            with contextlib.suppress(OSError):
                path.unlink()
                excess -= status.st_size


def private_directory() -> Path:
    """A directory of this process alone, removed when it exits.

    >>> private_directory() == private_directory()
    True
    """
    return _private_directory(os.getpid())  # a forked child gets its own: its parent removes the other one


@functools.cache
def warn_once(message: str) -> None:
    """Give this warning, at most once in a process."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@functools.cache
def _private_directory(owner: int) -> Path:
    path = Path(tempfile.mkdtemp(prefix="fuse-"))

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


def _entry_name(key: str, content: bytes, suffix: str) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()}{suffix}"


def _publish(target: Path, content: bytes) -> Path:
    """Write a file atomically: after a crash of the machine it is complete or absent."""
    target.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=_UNPUBLISHED)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:  # Ctrl-C too: leave no unfinished file
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(target.parent)
    return target


def _sync_directory(path: Path) -> None:
    # Not every file system can. Then a crash may lose the entry, and the next process builds it again.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _files(home: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in home.glob("*/*"):
        if _OWN_NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):  # removed meanwhile by another process
                yield path, path.lstat()
