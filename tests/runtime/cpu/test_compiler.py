"""Finding the compiler, its options, and the way from a source to a loaded library."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fuse.errors import CompileFailed, FuseError
from fuse.runtime.building import cache
from fuse.runtime.cpu import compiler, processor, toolchain

ANSWER = 'extern "C" int answer() { return 42; }'
THREADS = """
#include <omp.h>
extern "C" int allowed() { return omp_get_max_threads(); }
extern "C" int running() {
    int count = 0;
    #pragma omp parallel
    #pragma omp atomic
    count += 1;
    return count;
}
"""

pytestmark = pytest.mark.usefixtures("empty_cache")
with_openmp = pytest.mark.skipif(
    "-fopenmp" not in toolchain.tuning_options(toolchain.find()), reason="this compiler does not share torch's OpenMP"
)


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def no_compiling(*_: object) -> toolchain.CompilerRun:
    raise AssertionError("the compiler was called")


def test_a_source_is_compiled_once_and_loaded_once(monkeypatch):
    library = compiler.build(ANSWER)
    assert library.answer() == 42
    monkeypatch.setattr(toolchain, "compile_in", no_compiling)
    assert compiler.build(ANSWER) is library


def test_a_new_process_takes_the_library_from_the_cache(monkeypatch):
    compiler.build(ANSWER)
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(toolchain, "compile_in", no_compiling)
    assert compiler.build(ANSWER).answer() == 42


def test_threads_that_build_one_source_compile_it_once_and_share_one_library(compiled_sources):
    start = threading.Barrier(4)

    def build(_: int) -> object:
        start.wait()
        return compiler.build(ANSWER)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(build, range(4)))) == 1
    assert compiled_sources == [ANSWER]


def test_a_source_whose_compilation_fails_in_another_thread_is_compiled_again(monkeypatch):
    began, original = threading.Event(), toolchain.compile_in

    def interrupted(*args):
        if began.is_set():
            return original(*args)
        began.set()
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(toolchain, "compile_in", interrupted)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(compiler.build, ANSWER)
        began.wait()
        assert compiler.build(ANSWER).answer() == 42
        with pytest.raises(KeyboardInterrupt):
            first.result()


def test_a_forked_process_waits_for_no_compilation_of_its_parent(monkeypatch):
    began, ends, original = threading.Event(), threading.Event(), toolchain.compile_in

    def slow(*args):
        began.set()
        ends.wait()
        return original(*args)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(toolchain, "compile_in", slow)
        first = pool.submit(compiler.build, ANSWER)
        began.wait()
        monkeypatch.setattr(toolchain, "compile_in", original)
        child = os.fork()
        if not child:
            os._exit(compiler.build(ANSWER).answer())
        try:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        finally:
            ends.set()
        assert first.result().answer() == 42


def test_several_sources_are_built_in_order_and_the_first_failure_is_raised():
    sources = [f'extern "C" int answer() {{ return {number}; }}' for number in range(4)]
    assert [library.answer() for library in compiler.build_many(sources)] == [0, 1, 2, 3]
    assert compiler.build_many([]) == []
    with pytest.raises(CompileFailed, match="first_mistake"):
        compiler.build_many([ANSWER, "int x = first_mistake;", "int x = second_mistake;"])


def test_the_key_holds_all_that_makes_a_library_differ(monkeypatch):
    gcc = toolchain.Toolchain(("/usr/bin/g++",), "g++ 12.2")
    keys = [
        compiler._key(ANSWER, gcc, ("-DN=1",)),
        compiler._key(ANSWER + " ", gcc, ("-DN=1",)),
        compiler._key(ANSWER, gcc, ("-DN=2",)),
        compiler._key(ANSWER, gcc, ("-DN=1", "-DN=1")),
        compiler._key(ANSWER, toolchain.Toolchain(gcc.command, "g++ 13.1"), ("-DN=1",)),
        compiler._key(ANSWER, toolchain.Toolchain(("/opt/g++",), gcc.version), ("-DN=1",)),
    ]
    monkeypatch.setattr(processor, "features", lambda: "another processor")
    keys.append(compiler._key(ANSWER, gcc, ("-DN=1",)))
    assert len(set(keys)) == len(keys)


def test_flags_reach_the_compiler():
    assert compiler.build('extern "C" int n() { return N; }', flags=["-DN=7"]).n() == 7


def test_products_and_sums_round_separately():
    source = 'extern "C" float f(float a, float b, float c) { return a * b + c; }'
    function = compiler.build(source).f
    function.argtypes, function.restype = [compiler.ctypes.c_float] * 3, compiler.ctypes.c_float
    a, b, c = 1 + 2**-12, 1 + 2**-12, -(1 + 2**-11)
    assert function(a, b, c) == float(torch.tensor(a) * torch.tensor(b) + torch.tensor(c)) == 0.0


@with_openmp
def test_libraries_of_parallel_loops_ask_for_no_exceptions(tmp_path):
    """The linker would search the standard library of C++ for them, in each library that fuse builds."""
    source = 'void step(); extern "C" void run() {\n#pragma omp parallel\nstep();\n}'
    found = toolchain.find()
    assert toolchain.compile_in(tmp_path, source, found, toolchain.tuning_options(found)).status == 0
    assert b"__gxx_personality" not in (tmp_path / toolchain.LIBRARY_NAME).read_bytes()


def test_compiler_is_sought_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    for name in ("clang++", "g++", "c++"):  # each is preferred to those before it
        path = script(tmp_path / "bin" / name, f"echo {name} 1.0")
        assert toolchain.find() == toolchain.Toolchain((str(path),), f"{name} 1.0\n")
    mine = script(tmp_path / "mine", 'echo "$1" 2.0')
    monkeypatch.setenv("CXX", f"{mine} '--wrapped option'")
    assert toolchain.find() == toolchain.Toolchain((str(mine), "--wrapped option"), "--wrapped option 2.0\n")


def test_cxx_is_never_read_by_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", f"g++; touch {tmp_path}/shell")
    with pytest.warns(RuntimeWarning, match=r"CXX=.* is not a program that can be run: using /.*\+\+"):
        assert compiler.build(ANSWER).answer() == 42
    assert not (tmp_path / "shell").exists()


def test_unreadable_cxx_is_one_clear_error(monkeypatch):
    monkeypatch.setenv("CXX", "g++ 'unclosed")
    with pytest.raises(FuseError, match=r"CXX=.* cannot be read"):
        compiler.build(ANSWER)


def test_new_version_at_the_same_path_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", "echo version 1")))
    assert toolchain.find().version == "version 1\n"
    script(tmp_path / "c++", "echo version 10")
    assert toolchain.find().version == "version 10\n"


@pytest.mark.parametrize("text", ["soon", "-1", "0", "inf", "nan"])
def test_time_limit_must_be_a_number_of_seconds(monkeypatch, text):
    monkeypatch.setenv("FUSE_COMPILE_TIMEOUT", text)
    with pytest.raises(FuseError, match="positive number of seconds"):
        toolchain.time_limit()


@with_openmp
def test_torch_governs_the_threads_of_built_libraries():
    library = compiler.build(THREADS)
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert (library.allowed(), library.running()) == (count, count)
    finally:
        torch.set_num_threads(before)


@with_openmp
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's list of mapped files")
def test_built_libraries_use_the_openmp_that_torch_has_loaded():
    compiler.build(THREADS).running()
    with open("/proc/self/maps") as lines:
        mapped = {line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line or "libiomp" in line}
    assert len(mapped) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx\n\nflags\t\t: other core\n", ["avx", "avx2", "fpu"]),
        ("processor : 0\nFeatures : fp asimd\n", ["asimd", "fp"]),
        ("nothing of the kind\n", []),
    ],
)
def test_processor_features_are_those_of_the_first_core(tmp_path, text, expected):
    (tmp_path / "cpuinfo").write_text(text)
    assert processor._listed_features(tmp_path / "cpuinfo") == expected
    assert processor._listed_features(tmp_path / "missing") == []


def test_a_usual_build_warns_of_nothing_and_leaves_one_file(empty_cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiler.build(ANSWER)
    assert len([file for file in empty_cache.rglob("*") if file.is_file()]) == 1
    assert cache.directory() == empty_cache


@pytest.mark.skipif(not processor.is_x86(), reason="the name is of a processor of x86")
def test_libraries_may_be_built_for_another_processor(monkeypatch):
    source = """extern "C" int has_avx512() {
    #ifdef __AVX512F__
        return 1;
    #else
        return 0;
    #endif
    }"""
    monkeypatch.setenv("FUSE_PROCESSOR", "x86-64-v3")
    assert compiler.build(source).has_avx512() == 0
    monkeypatch.setenv("FUSE_PROCESSOR", "")
    assert compiler.build(source).has_avx512() == ("avx512f" in processor.features().split())


@pytest.mark.parametrize(
    ("source", "cpp"),
    [
        ('#include <vector>\nextern "C" int of(int n) { return (int)std::vector<int>(n).size(); }', True),
        ('# include<new>\nextern "C" int of(int n) { ::operator delete(::operator new(n)); return n; }', True),
        ('#include <math.h>\nextern "C" int of(int n) { return (int)(_Float16)log2f(exp2f((float)n)); }', False),
    ],
)
def test_the_library_of_cpp_is_linked_where_a_header_of_it_is_read(source, cpp, empty_cache):
    assert compiler.build(source).of(7) == 7
    (library,) = empty_cache.rglob("*.so")
    if sys.platform == "linux" and toolchain.find().is_gcc:
        assert (b"libstdc++" in library.read_bytes()) == cpp


@pytest.mark.skipif(not toolchain.find().is_gcc, reason="a sanitizer's library is linked by GCC")
def test_options_of_the_user_have_their_libraries(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "g++ -fsanitize=undefined")
    assert compiler.build('extern "C" int of(int n) { return 1 << n; }').of(3) == 8
