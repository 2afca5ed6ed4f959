"""The on-disk cache: what it accepts, where it writes, what it removes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from fuse.runtime.building import cache

KEY = cache.key_of("a source")
CONTENT = bytes(range(256)) * 16

pytestmark = pytest.mark.usefixtures("empty_cache")


def test_what_is_stored_is_found_again(empty_cache):
    path = cache.store(KEY, CONTENT)
    assert path.is_relative_to(empty_cache)
    assert cache.find(KEY) == (path, CONTENT)
    assert cache.find(cache.key_of("another source")) is None


def test_directory_is_closed_to_others_and_holds_no_name_but_hashes(empty_cache):
    path = cache.store(KEY, CONTENT)
    assert empty_cache.stat().st_mode & 0o777 == 0o700
    assert re.fullmatch(r"[0-9a-f]{2}/[0-9a-f]{64}-[0-9a-f]{64}\.so", str(path.relative_to(empty_cache)))
    assert [file for file in empty_cache.rglob("*") if file.is_file()] == [path]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"", lambda b: bytes([b[0] ^ 1]) + b[1:], lambda b: b + b"x"]
)
def test_damaged_entry_is_removed_and_not_returned(damage):
    path = cache.store(KEY, CONTENT)
    path.write_bytes(damage(CONTENT))
    assert cache.find(KEY) is None
    assert not path.exists()


def test_second_build_of_a_key_with_other_bytes_leaves_both_right():
    cache.store(KEY, CONTENT)
    second = cache.store(KEY, CONTENT[::-1])
    found = cache.find(KEY)
    assert found is not None
    assert found[1] in (CONTENT, CONTENT[::-1])
    second.write_bytes(b"damaged")
    assert cache.find(KEY) is not None


@pytest.mark.parametrize(
    ("chosen", "shared", "home", "expected"),
    [
        ("/var/mine", "/var/shared", "/home/me", "/var/mine"),
        ("~/mine", "/var/shared", "/home/me", "/home/me/mine"),
        (None, "/var/shared", "/home/me", "/var/shared/fuse"),
        (None, "relative/path", "/home/me", "/home/me/.cache/fuse"),
        (None, None, "/home/me", "/home/me/.cache/fuse"),
    ],
)
def test_location_follows_the_environment(monkeypatch, chosen, shared, home, expected):
    for name, value in {"FUSE_CACHE_DIR": chosen, "XDG_CACHE_HOME": shared, "HOME": home}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert cache.location() == Path(expected)


def test_user_without_a_home_has_the_cache_under_the_temporary_directory(monkeypatch):
    monkeypatch.delenv("FUSE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache.location().name == f"fuse-{os.geteuid()}"


def make_link(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.parent / "elsewhere").mkdir(mode=0o700)
    home.symlink_to(home.parent / "elsewhere")


def make_dangling_link(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.symlink_to(home.parent / "nowhere")


def make_foreign(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)


def make_writable_by_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    home.chmod(0o777)


def make_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_text("not a directory")


def make_parent_a_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.parent.joinpath("file").write_text("not a directory")
    monkeypatch.setenv("FUSE_CACHE_DIR", str(home.parent / "file" / "cache"))


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (make_link, "is a symbolic link"),
        (make_dangling_link, "is a symbolic link"),
        (make_foreign, "belongs to another user"),
        (make_writable_by_others, r"can be written by others \(mode 0777\)"),
        (make_file, "is not a directory"),
        (make_parent_a_file, "cannot be created"),
    ],
)
def test_directory_that_cannot_be_trusted_is_refused_with_one_warning(empty_cache, monkeypatch, prepare, reason):
    prepare(empty_cache, monkeypatch)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        path = cache.store(KEY, CONTENT)
        assert cache.find(KEY) == (path, CONTENT)
    assert [re.search(reason, str(warning.message)) is not None for warning in raised] == [True]
    assert path.is_relative_to(cache.private_directory())
    assert not list(empty_cache.parent.rglob("*.so"))


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_leaves_nothing_behind_and_goes_to_the_private_directory(empty_cache, monkeypatch, step):
    actual = getattr(os, step)
    failures = iter([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])

    def fail_once(*arguments):
        for failure in failures:
            raise failure
        return actual(*arguments)

    monkeypatch.setattr(os, step, fail_once)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        path = cache.store(KEY, CONTENT)
    assert path.is_relative_to(cache.private_directory())
    assert path.read_bytes() == CONTENT
    assert [file for file in empty_cache.rglob("*") if file.is_file()] == []


def test_sweep_removes_the_least_recently_used_first(empty_cache):
    paths = [cache.store(cache.key_of(str(number)), bytes([number]) * 1000) for number in range(4)]
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (time.time() - 100 * age - 100,) * 2)
    cache.find(cache.key_of("0"))  # the oldest one is used again
    cache.sweep(empty_cache, limit=2000)
    assert [path.exists() for path in paths] == [True, False, False, True]


def test_sweep_never_touches_files_of_others(empty_cache):
    cache.store(KEY, CONTENT)
    thesis = empty_cache / "documents" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    cache.sweep(empty_cache, limit=0)
    assert [file for file in empty_cache.rglob("*") if file.is_file()] == [thesis]


def test_sweep_removes_what_killed_processes_left_but_not_what_is_being_written(empty_cache):
    shelf = cache.store(KEY, CONTENT).parent
    left, being_written = shelf / ".unpublished-old", shelf / ".unpublished-new"
    for path in (left, being_written):
        path.write_bytes(b"half")
    os.utime(left, (time.time() - 86400,) * 2)
    cache.sweep(empty_cache)
    assert (left.exists(), being_written.exists()) == (False, True)


def test_every_sixty_fourth_store_sweeps(empty_cache, monkeypatch):
    swept = []
    monkeypatch.setattr(cache, "sweep", swept.append)
    for number in range(128):
        cache.store(cache.key_of(str(number)), b"")
    assert swept == [empty_cache, empty_cache]


def test_failed_source_is_kept_in_the_cache_or_where_that_is_refused_in_the_temporary_directory(empty_cache):
    assert cache.keep_source(KEY, "int x = ;\n") == empty_cache / "failed" / f"{KEY}.cpp"
    empty_cache.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="can be written by others"):
        kept = cache.keep_source(KEY, "int x = ;\n")
    assert kept.read_text() == "int x = ;\n"
    assert not kept.is_relative_to(empty_cache)
    kept.unlink()


def test_private_directory_goes_with_its_process_and_not_with_a_forked_child():
    program = """
import os, sys
from fuse.runtime.building import cache
mine = cache.private_directory()
if (child := os.fork()) == 0:
    theirs = cache.private_directory()
    sys.exit(0 if theirs != mine else 1)
_, status = os.waitpid(child, 0)
assert status == 0 and mine.is_dir()
print(mine)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not Path(ran.stdout.strip()).exists()
