"""Events of code are the same by a trace function, and by ``sys.monitoring`` of Python 3.12."""

from __future__ import annotations

import builtins
import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from fuse.graph.recording.code_events import Events, telling
from fuse.runtime.size_uses.loop_steps import looked_at

Told = list[tuple[str, str, Any]]


def double(n: int) -> int:
    return n * 2


def steps(n: int) -> Iterator[int]:
    for t in range(n):
        yield double(t)


def fails() -> None:
    raise ValueError


def total(n: int, sizes: list[int]) -> int:
    found = 0
    for t in steps(n):
        found += t
        sizes.append(t)
    try:
        fails()
    except ValueError:
        found += 1
    return found + len(sizes)


OWN = {one.__code__ for one in (double, steps, fails, total)}


def noting(told: Told) -> Events:
    """Events that are noted: calls, instructions and returns of our functions, and functions of C that they call."""

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return" or (event == "opcode" and frame.f_lasti in looked_at(frame.f_code)):
            told.append((event, frame.f_code.co_name, arg if event == "return" else frame.f_lasti))
        return local

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not is_own(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        told.append((event, frame.f_code.co_name, None))
        return local

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and is_own(frame):
            told.append((event, frame.f_code.co_name, arg.__name__))

    def is_own(frame: FrameType) -> bool:
        return frame.f_code in OWN

    return Events(trace, looked_at, is_own, watch)


def test_calls_instructions_returns_and_functions_of_c_are_told() -> None:
    told: Told = []
    with telling(noting(told)) as events:
        assert events is not None
        assert total(3, []) == 10
    calls = [(event, name, arg) for event, name, arg in told if event != "opcode"]

    def step(t: int) -> Told:
        return [
            ("call", "steps", None),
            ("call", "double", None),
            ("return", "double", 2 * t),
            ("return", "steps", 2 * t),
            ("c_call", "total", "append"),
        ]

    expected = [
        ("call", "total", None),
        *(one for t in range(3) for one in step(t)),
        ("call", "steps", None),
        ("return", "steps", None),
        ("call", "fails", None),
        ("return", "fails", None),
        ("c_call", "total", "len"),
        ("return", "total", 10),
    ]
    assert calls == expected
    starts = [at for event, name, at in told if (event, name) == ("opcode", "total")]
    assert any(starts.count(at) == 4 for at in starts)  # a loop of three steps asks for a fourth
    assert set(starts) <= looked_at(total.__code__)


def test_nothing_is_told_of_what_runs_asleep_in_other_threads_and_afterwards() -> None:
    told: Told = []
    with telling(noting(told)) as events:
        assert events is not None
        assert events.asleep(events.asleep, total, 3, []) == 10
        thread = threading.Thread(target=total, args=(3, []))
        thread.start()
        thread.join()
        assert not told
        assert double(1) == 2
    assert [event for event, *_ in told if event != "opcode"] == ["call", "return"]
    count = len(told)
    total(3, [])
    assert len(told) == count
    assert sys.gettrace() is None
    assert sys.getprofile() is None


def test_events_are_told_again_in_a_later_context() -> None:
    first: Told = []
    second: Told = []
    for told in (first, second):
        with telling(noting(told)):
            total(3, [])
    assert first == second


def test_an_error_ends_the_context() -> None:
    told: Told = []
    with pytest.raises(ValueError), telling(noting(told)):
        fails()
    assert sys.gettrace() is None
    with telling(noting([])) as events:
        assert events is not None


def test_nothing_is_told_where_a_debugger_is_active() -> None:
    told: Told = []
    tracing = sys.gettrace()
    sys.settrace(lambda frame, event, arg: None)
    try:
        with telling(noting(told)) as events:
            total(3, [])
    finally:
        sys.settrace(tracing)
    assert events is None
    assert not told


def test_a_trace_function_that_the_code_sets_is_kept() -> None:
    tracing = sys.gettrace()
    mine: Any = lambda frame, event, arg: None  # noqa: E731 - it has one identity
    with telling(noting([])) as events:
        assert events is not None
        sys.settrace(mine)
        events.asleep(double, 1)
        assert sys.gettrace() is mine
    kept = sys.gettrace()
    sys.settrace(tracing)
    assert kept is mine


def test_who_wants_to_know_nothing_more_is_told_nothing_more() -> None:
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += 1
        frame.f_trace_opcodes = False

    with telling(Events(trace, looked_at, lambda frame: frame.f_code in OWN)):
        for _ in range(5):
            total(3, [])
    assert count < 80


@pytest.mark.parametrize("how", ["import fresh_{}", "importlib.import_module('fresh_{}')", "from fresh_{} import n"])
def test_nothing_is_told_of_modules_that_are_imported(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = how.split()[0].partition(".")[0]
    (tmp_path / f"fresh_{name}.py").write_text("def double(n): return n * 2\nn = double(4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: sys.modules.pop(f"fresh_{name}", None))
    files: list[str] = []

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        files.append(frame.f_code.co_filename)

    code = compile(how.format(name), str(tmp_path / "importing.py"), "exec")
    own, module = builtins.__import__, importlib.import_module
    with telling(Events(trace, looked_at, lambda frame: str(tmp_path) in frame.f_code.co_filename)):
        exec(code, {"importlib": importlib})
    assert any(file.endswith("importing.py") for file in files)
    assert not any("fresh" in file for file in files)
    assert sys.modules[f"fresh_{name}"].n == 8
    assert (builtins.__import__, importlib.import_module) == (own, module)


def test_instructions_behind_a_prefix_are_looked_at() -> None:
    names = [f"a{n}" for n in range(300)]
    lines = [*(f"{name} = x" for name in names), "while x:", *(f"  {name} = {name} + 1" for name in names), "  x -= 1"]
    scope: dict[str, Any] = {}
    exec("def long(x):\n" + "\n".join(f" {line}" for line in lines), scope)
    code: CodeType = scope["long"].__code__
    OWN.add(code)
    told: Told = []
    with telling(noting(told)):
        scope["long"](3)
    OWN.discard(code)
    at = [offset for event, _, offset in told if event == "opcode"]
    assert any(at.count(offset) >= 2 for offset in at)
