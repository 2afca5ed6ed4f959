"""The C++ compiler of this machine: its command, its options, and its execution under a time limit.

It is ``$CXX``, or the first of ``c++``, ``g++`` and ``clang++``. It is started without a shell in its own process
group, which is killed at the time limit.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fuse.errors import CompileFailed, CompilerMissing, FuseError
from fuse.runtime.building import interrupts
from fuse.runtime.building.cache import warn_once
from fuse.runtime.cpu import processor

# Necessary for a correct library: contracting a*b+c would round otherwise than eager.
REQUIRED_OPTIONS = ("-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared")

_GCC_OPTIONS = (
    *("-ftree-vectorize", "-fvect-cost-model=dynamic", "-fpeel-loops", "--param=max-completely-peeled-insns=100"),
    "-funswitch-loops",
    "-fopenmp",
)

# All that a source needs that includes no header of C++, unless the user's options need more (sanitizers): to read the
# standard library of C++ for nothing takes the linker a sixth of the time of a small kernel.
_C_LIBRARIES = ("-nodefaultlibs", "-lgomp", "-lm", "-lc", "-lgcc")
_CPP_HEADER = re.compile(r"#\s*include\s*<\w+>")

SOURCE_NAME = "kernels.cpp"
LIBRARY_NAME = "kernels.so"

_DEFAULT_TIME_LIMIT = 120.0
_LONGEST_MESSAGE = 300
# Error lines of the compiler, assembler and linker; "collect2: error" only repeats that the linker failed.
_ERROR_LINE = re.compile(r"(?<!collect2: )\berror:|\bld: (?!warning)", re.IGNORECASE)


@dataclass(frozen=True)
class Toolchain:
    """A compiler command (an absolute path, then further words of ``$CXX``), and its output for ``--version``."""

    command: tuple[str, ...]
    version: str

    @property
    def is_gcc(self) -> bool:
        """Whether this is GCC, judged by its version text (``g++`` is Clang on macOS).

        >>> Toolchain(("/usr/bin/c++",), "c++ (Debian 12.2.0) 12.2.0\\n(C) 2022 Free Software Foundation, Inc.").is_gcc
        True
        """
        return "Free Software Foundation" in self.version


@dataclass(frozen=True)
class CompilerRun:
    """The outcome of a compiler run: exit status (negative: the signal that ended it) and its output."""

    status: int
    output: str

    @property
    def first_error(self) -> str:
        """The first error line of the output, shortened; or how the compiler ended.

        >>> CompilerRun(1, "In function f:\\nk.cpp:3:5: error: 'x' was not declared\\nk.cpp:9:1: error: y").first_error
        "k.cpp:3:5: error: 'x' was not declared"
        >>> CompilerRun(-9, "").first_error
        'ended by signal 9'
        """
        lines = [" ".join(line.split()) for line in self.output.splitlines() if line.strip()]
        ending = f"ended by signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        errors = filter(_ERROR_LINE.search, lines)
        return next(errors, lines[0] if lines else ending)[:_LONGEST_MESSAGE]


def find() -> Toolchain:
    """The compiler to use now.

    Raises:
        CompilerMissing: there is none.

    >>> find() == find()
    True
    """
    requested = os.environ.get("CXX", "").strip()
    for name in (requested, "c++", "g++", "clang++"):
        words = _words(name)
        if words and (path := shutil.which(words[0])):
            if name != requested and requested:
                warn_once(f"CXX={requested!r} is not a program that can be run: using {path}")
            status = os.stat(path)
            return _identified((os.path.abspath(path), *words[1:]), status.st_mtime_ns, status.st_size)
    raise CompilerMissing(
        "no C++ compiler among $CXX, c++, g++, clang++; install one (g++ or clang++) or set CXX to its path"
    )


def tuning_options(toolchain: Toolchain) -> tuple[str, ...]:
    """The options that make libraries faster.

    The target is this machine's processor, or the one that ``$FUSE_PROCESSOR`` names in the compiler's notation
    (``x86-64-v3``: AVX2, no AVX-512), to show what other machines would run.

    GCC gets what kernels gain from -O3: vector loops, short loops of few instructions unrolled whole, which keeps the
    lanes of a sum in registers, and conditions on sizes moved out of loops (windows of a length that varies are 0.6
    times as fast without: ``python -m benchmarks.sizes "windows of 8" fuse``). The rest of -O3 makes no measured kernel
    faster and takes the compiler up to twice as long.

    Kernels throw nothing. Told so, GCC makes no tables of exceptions for parallel loops, and the linker reads nothing
    of the standard library of C++ for them, which took it a tenth of a second a library.

    Only GCC gets OpenMP, because torch has loaded GCC's runtime. Clang would load its own runtime too, with threads
    that ``torch.set_num_threads`` does not control.

    >>> "-fopenmp" in tuning_options(Toolchain(("/usr/bin/clang++",), "clang version 18.1.3"))
    False
    """
    options = ["-fno-math-errno", "-fno-trapping-math", "-fno-exceptions"]
    # For Arm, -mcpu sets architecture and tuning together.
    name = os.environ.get("FUSE_PROCESSOR") or "native"
    options += [f"-march={name}", "-mprefer-vector-width=512"] if processor.is_x86() else [f"-mcpu={name}"]
    return (*options, *_GCC_OPTIONS) if toolchain.is_gcc else (*options, "-O3")


def compile_in(directory: Path, source: str, toolchain: Toolchain, options: Sequence[str]) -> CompilerRun:
    """Compile ``source`` to ``LIBRARY_NAME`` in ``directory``, with the required options and ``options``.

    Names in the command are relative, so that the library does not depend on the directory.

    Raises:
        CompileFailed: the compiler could not be started or exceeded its time limit.
    """
    (directory / SOURCE_NAME).write_text(source, encoding="utf-8", errors="surrogateescape")
    command = [*toolchain.command, *REQUIRED_OPTIONS, SOURCE_NAME, "-o", LIBRARY_NAME, *options]
    of_user = len(toolchain.command) > 1
    if toolchain.is_gcc and sys.platform == "linux" and not (of_user or _CPP_HEADER.search(source)):
        command += _C_LIBRARIES
    return _run(command, directory)


def time_limit() -> float:
    """The most seconds that a compiler may run: ``$FUSE_COMPILE_TIMEOUT``, or 120.

    >>> time_limit() > 0
    True
    """
    text = os.environ.get("FUSE_COMPILE_TIMEOUT", "")
    try:
        seconds = float(text) if text else _DEFAULT_TIME_LIMIT
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise FuseError(f"FUSE_COMPILE_TIMEOUT={text!r} is not a time limit; give a positive number of seconds")
    return seconds


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise FuseError(
            f"CXX={command!r} cannot be read ({error}); give a program's path and, if need be, options"
        ) from None


@functools.cache
def _identified(command: tuple[str, ...], modified_ns: int, size: int) -> Toolchain:
    """The toolchain with its version, which is read again only if the program's file changes."""
    outcome = _run([*command, "--version"], Path(os.sep))
    return Toolchain(command, outcome.output)


def _run(command: Sequence[str], directory: Path) -> CompilerRun:
    limit = time_limit()
    if interrupts.are_stopped():
        raise CompileFailed(f"compiler {command[0]} was not started: the call was interrupted")
    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, "LC_ALL": "C"},  # error lines are read for the word "error"
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with interrupts.running(process):
            output, _ = process.communicate(timeout=limit)
    except OSError as error:
        raise CompileFailed(
            f"compiler {command[0]} cannot be started: {error.strerror}; set CXX to another one"
        ) from error
    except subprocess.TimeoutExpired:
        raise CompileFailed(
            f"compiler {command[0]} did not finish within {limit:g} s and was stopped; "
            f"set FUSE_COMPILE_TIMEOUT to more seconds or CXX to another compiler"
        ) from None
    finally:  # after the user's Ctrl-C too, which does not reach the group by itself
        if process is not None and process.returncode is None:
            interrupts.kill_group(process.pid)
            process.communicate()
    return CompilerRun(process.returncode, output.decode(errors="replace"))
