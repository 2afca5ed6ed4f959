"""The environment in which kernels are compiled with sanitizers: an access outside of a tensor ends the process.

Python and torch are not compiled so; GCC's libraries are loaded before them, and libstdc++ with these, since exceptions
are thrown through what they wrap.
"""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

OPTIONS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=alignment -g1"
"""Alignment is left out: x86-64 reads vectors from any address, and kernels ask for that by name."""
LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so.6")


def sanitized(folder: Path) -> dict[str, str]:
    """This process's environment with sanitizers for the kernels that a new process compiles, g++ being there.

    ``folder`` holds the compiler's wrapper and the cache of kernels.
    """
    compiler = folder / "g++"
    compiler.write_text(f'#!/bin/sh\nexec env -u LD_PRELOAD g++ "$@" {OPTIONS}\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    libraries = (_found(name) for name in LIBRARIES)
    return {
        **os.environ,
        "CXX": str(compiler),
        "FUSE_CACHE_DIR": str(folder / "cache"),
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves objects behind at its end
    }


def _found(library: str) -> str:
    told = subprocess.run(["g++", f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    return told.stdout.strip()
