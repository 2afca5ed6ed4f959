"""Cache of results about patterns on disk, under a hash of the pattern's code: no code is tested twice.

    key   =  the pattern's source, torch, Python, the files of fuse that found it out, and what was asked
    value =  text

A change of any of these is another key, so that nothing is ever out of date.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import torch

from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.handed import shelf
from fuse.rewrite.patterns.source import source_of

SUFFIX = ".txt"
_FOLDERS = ("graph", "rewrite/patterns", "check")


def find(pattern: Pattern, *asked: str) -> bytes | None:
    """The stored result for ``pattern``, or None where there is none yet."""
    entry = shelf().find(_key(pattern, *asked), SUFFIX)
    return None if entry is None else entry[1]


def keep(content: bytes, pattern: Pattern, *asked: str) -> None:
    """Keep ``content`` as the answer."""
    shelf().store(_key(pattern, *asked), content, SUFFIX)


def _key(pattern: Pattern, *asked: str) -> str:
    return shelf().key_of("pattern", _source(pattern), _finders(), torch.__version__, platform.python_version(), *asked)


@cache
def _source(pattern: Pattern) -> str:
    return source_of(pattern)


@cache
def _finders() -> str:
    """The files that find out, by size and time: what another version of them found does not hold."""
    home = Path(__file__).parent.parent.parent
    entries = [entry for folder in _FOLDERS for entry in os.scandir(home / folder) if entry.name.endswith(".py")]
    told = [(entry.path, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries]
    return repr(sorted(told))
