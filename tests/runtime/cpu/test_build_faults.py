"""What may go wrong between a source and a loaded library: each ends in the right result or in one clear error."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fuse.errors import CompileFailed, CompilerMissing, FuseError
from fuse.runtime.building import cache
from fuse.runtime.cpu import compiler, toolchain

ANSWER = 'extern "C" int answer() { return 42; }'
BUILD_AND_PRINT = f"from fuse.runtime.cpu.compiler import build\nprint(build({ANSWER!r}).answer())\n"

pytestmark = pytest.mark.usefixtures("empty_cache")


def use_compiler(path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def assert_builds_with_one_warning(pattern: str) -> None:
    with pytest.warns(RuntimeWarning, match=pattern) as raised:
        answers = [compiler.build(ANSWER.replace("42", str(number))).answer() for number in (42, 43)]
    assert answers == [42, 43]
    assert len(raised) == 1
    assert "\n" not in str(raised[0].message)


def assert_one_line(error: FuseError, *parts: str) -> None:
    assert "\n" not in str(error)
    assert [part for part in parts if part not in str(error)] == []


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


# The compiler


def test_no_compiler_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CompilerMissing) as raised:
        compiler.build(ANSWER)
    assert_one_line(raised.value, "no C++ compiler", "set CXX")


def test_rejected_source_is_named_by_its_first_error_and_kept():
    source = 'extern "C" int answer() {\n    return undeclared;\n}\nint also_wrong = nowhere;\n'
    with pytest.raises(CompileFailed) as raised:
        compiler.build(source)
    assert_one_line(raised.value, "kernels.cpp:2", "undeclared")
    assert Path(str(raised.value).rsplit(" ", 1)[1]).read_text() == source
    assert compiler.build(ANSWER).answer() == 42


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'note: hm' >&2; echo 'fatal error: no licence' >&2; exit 1", "fatal error: no licence"),
        ("echo '/usr/bin/ld: cannot find -lm'; echo 'collect2: error: ld returned 1'; exit 1", "ld: cannot find -lm"),
        ("echo 'out of sorts'; exit 3", "out of sorts"),
        ("exit 3", "exit status 3"),
        ("kill -SEGV $$", f"ended by signal {signal.SIGSEGV.value}"),
    ],
)
def test_failing_compiler_is_one_clear_error(tmp_path, monkeypatch, body, said):
    use_compiler(tmp_path / "broken", body, monkeypatch)
    with pytest.raises(CompileFailed) as raised:
        compiler.build(ANSWER)
    assert_one_line(raised.value, str(tmp_path / "broken"), said)


def test_compiler_that_is_no_program_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "broken").write_bytes(b"\x7fELF but not really")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "broken"))
    with pytest.raises(CompileFailed) as raised:
        compiler.build(ANSWER)
    assert_one_line(raised.value, str(tmp_path / "broken"), "cannot be started")


def test_compiler_that_writes_no_library_is_one_clear_error(tmp_path, monkeypatch):
    use_compiler(tmp_path / "idle", "exit 0", monkeypatch)
    with pytest.raises(CompileFailed) as raised:
        compiler.build(ANSWER)
    assert_one_line(raised.value, "cannot build", "No such file")


@pytest.mark.parametrize("hangs_at", ["--version", "-shared"])
def test_hanging_compiler_is_stopped_with_all_it_started(tmp_path, monkeypatch, hangs_at):
    survived = tmp_path / "survived"
    hang = f"(sleep 1.5; touch {survived}) & wait"
    use_compiler(tmp_path / "slow", f'case "$*" in *{hangs_at}*) {hang};; esac', monkeypatch)
    monkeypatch.setenv("FUSE_COMPILE_TIMEOUT", "0.3")
    start = time.monotonic()
    with pytest.raises(CompileFailed) as raised:
        compiler.build(ANSWER)
    assert time.monotonic() - start < 1.5
    assert_one_line(raised.value, "did not finish within 0.3 s", "FUSE_COMPILE_TIMEOUT")
    time.sleep(1.7 - (time.monotonic() - start))
    assert not survived.exists()


# The disk


def raising(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_cache_that_cannot_be_written_is_replaced_by_a_temporary_directory(empty_cache, monkeypatch, number):
    actual = cache._publish

    def publish(target: Path, content: bytes) -> Path:
        return raising(number)() if target.is_relative_to(empty_cache) else actual(target, content)

    monkeypatch.setattr(cache, "_publish", publish)
    assert_builds_with_one_warning(os.strerror(number))


def test_read_only_cache_still_gives_what_it_holds(monkeypatch):
    compiler.build(ANSWER)
    monkeypatch.setattr(compiler, "_loaded", {})
    for name in ("utime", "replace", "unlink"):
        monkeypatch.setattr(os, name, raising(errno.EROFS))
    monkeypatch.setattr(toolchain, "compile_in", raising(errno.ENOENT))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.build(ANSWER).answer() == 42


@pytest.mark.parametrize("step", ["compile_in", "store"])
def test_no_room_anywhere_is_one_clear_error(monkeypatch, step):
    monkeypatch.setattr(toolchain if step == "compile_in" else cache, step, raising(errno.ENOSPC))
    with pytest.raises(CompileFailed) as raised:
        compiler.build(ANSWER)
    assert_one_line(raised.value, "cannot build", "No space left on device", "TMPDIR")


def test_cache_that_cannot_be_loaded_from_is_replaced_by_copies(empty_cache, monkeypatch):
    actual = compiler.ctypes.CDLL

    def load(path: str) -> object:
        if Path(path).is_relative_to(empty_cache):
            raise OSError(f"{path}: failed to map segment from shared object")
        return actual(path)

    monkeypatch.setattr(compiler.ctypes, "CDLL", load)
    assert_builds_with_one_warning("cannot be loaded from")


def test_library_that_can_be_loaded_nowhere_is_one_clear_error():
    with pytest.raises(CompileFailed) as raised:
        compiler.build('extern "C" int nowhere_defined(); extern "C" int answer() { return nowhere_defined(); }')
    assert_one_line(raised.value, "cannot load", "nowhere_defined", "FUSE_CACHE_DIR")


def test_entry_swept_away_before_it_is_loaded_is_loaded_all_the_same(monkeypatch):
    path, content = Path("/nonexistent/3f/entry.so"), Path(compiler.build(ANSWER)._name).read_bytes()
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(cache, "find", lambda key: (path, content))
    with pytest.warns(RuntimeWarning, match="cannot be loaded from"):
        assert compiler.build(ANSWER).answer() == 42


@functools.cache
def can_mount() -> bool:
    """Whether this system lets us mount file systems of our own, seen by our children only."""
    try:
        return subprocess.run(own_mounts("mount -t tmpfs tmpfs /mnt"), capture_output=True).returncode == 0
    except OSError:
        return False


def own_mounts(command: str) -> list[str]:
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command]


@pytest.mark.parametrize(
    ("mount", "said"),
    [
        (
            "mount -t tmpfs -o size=16k,mode=0700 tmpfs {0} && head -c 16k /dev/zero > {0}/ballast",
            "No space left on device",
        ),
        ("mount -t tmpfs -o ro,mode=0700 tmpfs {0}", "Read-only file system"),
        ("mount -t tmpfs -o noexec,mode=0700 tmpfs {0}", "cannot be loaded from"),
    ],
    ids=["full", "read-only", "noexec"],
)
def test_real_file_systems_that_refuse(empty_cache, mount, said):
    if not can_mount():
        pytest.skip("needs the right to mount in a user namespace")
    empty_cache.mkdir(mode=0o700)
    program = empty_cache.parent / "program.py"
    program.write_text(BUILD_AND_PRINT)
    command = f"{mount.format(empty_cache)}; exec {sys.executable} {program}"
    ran = subprocess.run(own_mounts(command), capture_output=True, text=True)
    assert ran.stdout == "42\n", ran.stderr
    assert ran.stderr.count("RuntimeWarning") == 1
    assert said in ran.stderr


# Damaged entries


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:2000] + bytes([content[2000] ^ 0x10]) + content[2001:],
    ],
    ids=["truncated", "empty", "flipped"],
)
def test_damaged_entry_is_built_again(empty_cache, monkeypatch, damage):
    compiler.build(ANSWER)
    (entry,) = files_in(empty_cache)
    content = entry.read_bytes()
    entry.unlink()  # the loaded one keeps its memory
    entry.write_bytes(damage(content))
    monkeypatch.setattr(compiler, "_loaded", {})
    assert compiler.build(ANSWER).answer() == 42
    assert [file.read_bytes() for file in files_in(empty_cache)] == [content]


@pytest.mark.parametrize("prepare", ["link", "foreign"])
def test_nothing_is_loaded_from_a_directory_of_another(empty_cache, monkeypatch, prepare):
    compiler.build(ANSWER)
    monkeypatch.setattr(compiler, "_loaded", {})
    if prepare == "link":
        empty_cache.rename(empty_cache.parent / "theirs")
        empty_cache.symlink_to(empty_cache.parent / "theirs")
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.warns(RuntimeWarning, match="set FUSE_CACHE_DIR to a directory of your own") as raised:
        library = compiler.build(ANSWER)
    assert library.answer() == 42
    assert len(raised) == 1
    assert Path(library._name).is_relative_to(cache.private_directory())


# Killed and racing processes


def killed_at(step: str) -> str:
    """A program that is killed by the first call of one function, and calls it only halfway where that can be."""
    return textwrap.dedent(f"""
        import os, signal, sys, tempfile
        from fuse.runtime.building import cache
        from fuse.runtime.cpu import compiler

        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        def write_half(descriptor, mode):
            class Half:
                def __enter__(self): return self
                def __exit__(self, *_): return None
                def write(self, content):
                    os.write(descriptor, content[: len(content) // 2])
                    die()
            return Half()

        {step}
    """)


@pytest.mark.parametrize(
    "step",
    [
        "compiler.toolchain.compile_in = die",
        "cache._publish = die",
        "os.fdopen = write_half",
        "os.fsync = die",
        "os.replace = die",
        "cache._sync_directory = die",
        "compiler.ctypes.CDLL = die",
    ],
)
def test_a_process_killed_at_any_step_harms_no_later_one(empty_cache, monkeypatch, step):
    killed = subprocess.run([sys.executable, "-c", killed_at(step) + BUILD_AND_PRINT], capture_output=True, text=True)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, ""), killed.stderr
    later = subprocess.run([sys.executable, "-c", BUILD_AND_PRINT], capture_output=True, text=True)
    assert (later.stdout, later.stderr) == ("42\n", "")
    entries = [file for file in files_in(empty_cache) if file.suffix == ".so"]
    assert len(entries) == 1


def test_a_process_killed_while_compiling_harms_no_later_one(tmp_path, monkeypatch):
    real = toolchain.find().command[0]
    use_compiler(tmp_path / "c++", f'case "$*" in *-shared*) kill -KILL $PPID;; *) {real} "$@";; esac', monkeypatch)
    killed = subprocess.run([sys.executable, "-c", BUILD_AND_PRINT], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL
    monkeypatch.setenv("CXX", real)
    assert compiler.build(ANSWER).answer() == 42


def test_eight_processes_build_one_key_at_once(empty_cache):
    command = [sys.executable, "-c", "import sys; sys.stdin.readline()\n" + BUILD_AND_PRINT]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate() for process in processes] == [("42\n", "")] * 8
    for entry in files_in(empty_cache):
        assert entry.stem.split("-")[1] == hashlib.sha256(entry.read_bytes()).hexdigest()
