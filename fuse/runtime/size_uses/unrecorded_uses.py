"""Uses of symbolic sizes that are not recorded by themselves: they are recorded here, or refused.

    math.log2(x.shape[0])            C code reads the number: recorded as n0 == 37
    from math import log2            a function under its own name cannot be replaced: refused
    for step in x: steps += 1        counts steps without reading a size: refused if steps is used after the loop
    for step in x: place += hop      counts if hop is a plain number: place is noted
    for step in x: n = f(n)          n changes in each step: the number of steps is noted (loop_steps.py)
    self.factors[x.shape[0]]         indexing of lists (of numbers or functions), strings, arrays reads it: such code
                                     runs again with watched sizes, which record that
    "bias_%d" % x.shape[0]           formatting by an operator reads the number: refused
    type(x.shape[0]) is int          is false for a symbolic size: refused
    torch.numel(x)                   returns a plain number: refused
    with saved_tensors_hooks(p, u)   u runs in the backward pass, which is not recorded: refused

If a use is refused, the calls of the model are captured at each size.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import itertools
import math
import operator
import re
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from fuse.graph.patches.patched import patched
from fuse.graph.recording.code_events import Events, telling
from fuse.kernel.arithmetic.extents import pinned
from fuse.runtime.size_uses.bytecode_uses import instructions, is_constant, use_of
from fuse.runtime.size_uses.counting import Int
from fuse.runtime.size_uses.hand_counters import added_up, counters, counts
from fuse.runtime.size_uses.int_uses import may_replace_int
from fuse.runtime.size_uses.loop_steps import LoopSteps, Note, looked_at
from fuse.runtime.size_uses.tables import is_table

_MATH = {
    name: getattr(math, name)
    for name in ("comb", "factorial", "gcd", "isqrt", "lcm", "ldexp", "log", "log10", "log2", "perm")
}
_BUILTIN = {name: getattr(builtins, name) for name in ("bin", "chr", "hex", "oct")}
_READERS = frozenset({*_MATH.values(), *_BUILTIN.values()})
_SIZE_GETTERS = frozenset({"is_same_size", "numel", "nelement", "size", "storage_offset", "stride", "untyped_storage"})
"""Functions that return sizes of tensors as plain numbers."""
_INTEGERS = {"int": Int}
_LAYERS = "torch.nn.modules."
"""torch's own layers, of which some read a size as ``int(batch_sizes[0])``."""
_NUMBER_IN_TEXT = re.compile(r"%[^%]*?[diouxXc]")
_LOOKING_UP = frozenset({"__delitem__", "__getitem__", "__setitem__", "insert", "pop", "rotate"})
"""Methods of lists and the like that are given a position."""
_GETTERS = frozenset({"bytearray", "bytes", "islice", "itemgetter", "slice"})
"""Classes of Python that are given a position or a length."""
_OF_TEXTS = frozenset({"center", "count", "expandtabs", "find", "index", "ljust", "replace", "rjust", "split", "zfill"})
"""Methods of texts that are given a number."""
_CALLING = frozenset(
    {
        *("_collections_abc", "abc", "builtins", "collections", "contextlib", "contextvars", "copy", "dataclasses"),
        *("enum", "functools", "gc", "inspect", "itertools", "logging", "operator", "os", "re", "sys", "thread"),
        *("threading", "time", "types", "typing", "warnings", "weakref"),
    }
)
"""Modules of Python's library that read no numbers by themselves."""
MOST = 10_000_000
"""About how many microseconds it may take to look at the steps of loops."""
_HOOKING = "_push_saved_tensors_default_hooks"


@contextlib.contextmanager
def recording_uses(
    refuse: Callable[[str], None],
    counting: Mapping[str, Any],
    running: dict[FrameType, Any],
    watched: bool,
    unwatched: Callable[[], None],
    count: Callable[[Hashable], None],
    steps_differ: Note,
    reaches: Callable[[int, int], None],
) -> Iterator[Events | None]:
    """A context in which functions that read numbers in C pin sizes, and ``refuse`` is called for other uses.

    ``counting`` are replacements of Python's counting functions, by name. They are added to the globals of the code
    that runs, so that other code of the process keeps Python's. ``running`` gets the function of C that each frame
    calls now. Where sizes are ``watched`` integers, these record look-ups in tables by themselves; otherwise
    ``unwatched`` is called for code that may look a size up. ``count`` notes a plain number that was added up in a
    loop. ``steps_differ`` and ``reaches`` are those of :class:`LoopSteps`.
    """
    names = {**counting, **{name: _recording(own) for name, own in _BUILTIN.items()}}
    given: dict[tuple[int, int], tuple[dict[str, Any], Mapping[str, Any]]] = {}
    known_code: dict[CodeType, bool] = {}  # of all code that was called

    def give(to: dict[str, Any], replacements: Mapping[str, Any]) -> None:
        """Add replacements to the globals of the code that runs, once."""
        if (key := (id(to), id(replacements))) not in given:
            added = {name: one for name, one in replacements.items() if name not in to}
            given[key] = to, added
            to.update(added)

    def begin(frame: FrameType) -> bool:
        """Whether code that is called the first time is torch's, Python's or ours; it gets a replacement of ``int``."""
        known, name = is_known(frame), frame.f_globals.get("__name__", "")
        converts = (not known or name.startswith(_LAYERS)) and _converts(frame.f_code)
        if converts and may_replace_int(frame.f_code, frame.f_globals):
            give(frame.f_globals, _INTEGERS)
        return known_code.setdefault(frame.f_code, known)

    def look_up(frame: FrameType, in_tables: bool) -> None:
        """Note whether code looks up in tables."""
        if (in_tables and counters(frame.f_code)) or not _counts_in_tensors(frame):
            refuse(f"{_place(frame)} counts steps")
        elif in_tables and not watched:
            unwatched()

    def watch(frame: FrameType, event: str, called: Any) -> None:
        running.pop(frame, None)
        if event == "c_call":
            if called is not sys.setprofile:  # after which nothing is seen
                running[frame] = called
            if called.__name__ == _HOOKING:
                refuse("saved tensors have hooks")
        elif event not in ("call", "return"):
            return
        if (known := known_code.get(frame.f_code)) is None:
            known = begin(frame) if event == "call" else is_known(frame)
        if known:
            caller = frame.f_back
            if event == "call" and caller is not None and not known_code.get(caller.f_code, True) and _reads(frame):
                look_up(caller, True)
            return
        if event == "return":
            for name in added_up(frame.f_code):
                if type(found := frame.f_locals.get(name)) is int:
                    count(found)
            look_up(frame, _has_local_tables(frame))
            caller = frame.f_back
            if caller is not None and not known_code.get(caller.f_code, True) and looks_up(caller.f_code):
                look_up(caller, is_table(called))  # the value that is returned
        elif event == "call":
            give(frame.f_globals, names)
            if counts(frame.f_code) or _counts_on(frame):
                refuse(f"{_place(frame)} counts steps")
            elif _formats_or_asks_types(frame.f_code):
                refuse(f"{_place(frame)} formats numbers, or asks whether a type is int")
            else:
                look_up(frame, _looks_up_in_tables(frame))
        elif _may_look_up(called):
            look_up(frame, True)
        elif called in _READERS or called.__name__ in _SIZE_GETTERS or (called.__module__ or "").startswith("numpy"):
            refuse(f"{_place(frame)} calls {called.__name__}")

    def is_own(frame: FrameType) -> bool:
        known = known_code.get(frame.f_code)
        return not (is_known(frame) if known is None else known)

    steps = LoopSteps(is_own, steps_differ, reaches, MOST)
    try:
        recorded = {name: _recording(own) for name, own in _MATH.items()}
        events = Events(steps.trace, looked_at, is_own, watch)
        with patched(math, recorded), patched(operator, {"index": _recording(operator.index)}), telling(events) as told:
            if told is None:
                refuse("a Python profiler or debugger is active")
            yield told
    finally:
        steps.end()
        if steps.gave_up:
            refuse("its Python code could not be watched")
        running.clear()
        for of, added in given.values():
            for name, one in added.items():
                if of.get(name) is one:
                    del of[name]


def is_known(frame: FrameType) -> bool:
    """Whether code is torch's, Python's or ours."""
    module = frame.f_globals.get("__name__", "").partition(".")[0]
    return module in ("fuse", "torch") or (module in sys.stdlib_module_names and module != "__main__")


def _reads(frame: FrameType) -> bool:
    """Whether code is Python's, and may read the numbers that it is given."""
    module = frame.f_globals.get("__name__", "").partition(".")[0]
    return module in sys.stdlib_module_names and module not in _CALLING


def _may_look_up(called: Any) -> bool:
    """Whether a function of C may look up in a table, or read a number otherwise.

    >>> _may_look_up("abc".center), _may_look_up([1, 2].pop), _may_look_up([1, 2].append), _may_look_up(len)
    (True, True, False, False)
    """
    owner, module = getattr(called, "__self__", None), (called.__module__ or "").partition(".")[0].lstrip("_")
    if called.__name__ in _LOOKING_UP and is_table(owner):
        return True
    if isinstance(owner, (str, bytes)) and called.__name__ in _OF_TEXTS:
        return True
    return module in sys.stdlib_module_names and module not in _CALLING and called not in _READERS


def _place(frame: FrameType) -> str:
    """Where code runs, as ``forward at model.py:12``."""
    return f"{frame.f_code.co_name} at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _recording(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def noting(*numbers: Any) -> Any:
        return own(*map(pinned, numbers))

    return noting


def _counts_on(frame: FrameType) -> bool:
    names = frame.f_code.co_names
    if "accumulate" in names:
        return True
    return "count" in names and ("itertools" in names or frame.f_globals.get("count") is itertools.count)


@functools.lru_cache(maxsize=4096)
def _converts(code: CodeType) -> bool:
    """Whether code calls ``int``, or may have ``map`` call it.

    >>> _converts((lambda x: int(x.shape[0])).__code__), _converts((lambda x: isinstance(x, int)).__code__)
    (True, False)
    """
    if "int" not in code.co_names:
        return False
    loads = (one.argrepr for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL" and one.argval == "int")
    return any("NULL" in text or "map" in code.co_names for text in loads)


@functools.lru_cache(maxsize=4096)
def _formats_or_asks_types(code: CodeType) -> bool:
    """Whether code formats numbers by ``%``, or may compare a type with ``int``.

    >>> _formats_or_asks_types((lambda n: "size %d" % n).__code__), _formats_or_asks_types((lambda n: n % 2).__code__)
    (True, False)
    """
    if {"type", "int"} <= set(code.co_names):
        return True
    found = any(isinstance(one, str) and _NUMBER_IN_TEXT.search(one) for one in code.co_consts)
    return found and any(one.opname == "BINARY_OP" and one.argrepr in ("%", "%=") for one in dis.get_instructions(code))


@functools.lru_cache(maxsize=4096)
def looks_up(code: CodeType) -> bool:
    """Whether code indexes or slices by anything but a constant.

    >>> def of(code): return looks_up(compile(code, "", "eval"))
    >>> of("t[n]"), of("t[:n]"), of("t[n % 3]"), of("t[0]"), of("t[-1]"), of("t['a']"), of("t + n")
    (True, True, True, False, False, False, False)
    """
    return any(
        one.opname == "BINARY_SLICE"
        or ((one.opname == "BINARY_SUBSCR" or one.argrepr == "[]") and "CONST" not in before.opname)
        for before, one in itertools.pairwise(instructions(code))
    )


def _looks_up_in_tables(frame: FrameType) -> bool:
    if _GETTERS.intersection(frame.f_code.co_names):
        return True
    return looks_up(frame.f_code) and (_looks_up_results(frame.f_code) or any(map(is_table, _named(frame))))


@functools.lru_cache(maxsize=4096)
def _looks_up_results(code: CodeType, further: tuple[str, ...] = ()) -> bool:
    """Whether code may look up in a table that has no name, or that one of the ``further`` instructions gives.

    >>> def of(code): return _looks_up_results(compile(code, "", "eval"))
    >>> of("(1, 2)[n]"), of("[a, b][n]"), of("table()[n]"), of("table()[0]"), of("t[n]"), of("self.t[n]")
    (True, True, True, False, False, False)
    """
    found = instructions(code)
    made = ("CALL", "CALL_FUNCTION_EX", "BUILD_LIST", "BUILD_TUPLE", "LIST_EXTEND")
    return any(
        use_of(found, place) == "container"
        for place, one in enumerate(found)
        if one.opname in (*made, *further) or (is_constant(one) and isinstance(one.argval, (tuple, str, bytes)))
    )


def _has_local_tables(frame: FrameType) -> bool:
    """Whether code has looked up in a table that it has made."""
    names = _local_containers(frame.f_code) if looks_up(frame.f_code) else ()
    return bool(names) and any(is_table(frame.f_locals.get(name)) for name in names)


def _counts_in_tensors(frame: FrameType) -> bool:
    """Whether code that counts steps by hand indexes tensors, and lists of tensors, only. Another object that an index
    chooses may outlive its step, which is the last one at another length. Seen at the call are the arguments, and at
    the return the local variables: each has at most one other value in between."""
    code = frame.f_code
    if not counters(code):
        return True
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    names = _local_containers(code)
    stored = [one.argval for one in instructions(code) if one.opname in ("STORE_FAST", "STORE_DEREF")]
    once = all(stored.count(name) < 2 for name in names)
    local = _looks_up_results(code, ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME"))
    seen = (frame.f_locals.get(name) for name in names if name in arguments or name in frame.f_locals)
    return once and not local and all(map(_is_of_tensors, seen))


def _is_of_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple, deque)):
        return all(map(_is_of_tensors, value))
    return value is None or isinstance(value, torch.Tensor)


@functools.lru_cache(maxsize=4096)
def _local_containers(code: CodeType) -> frozenset[str]:
    """The local variables that code may index by anything but a constant.

    >>> def forward(x, n):
    ...     table, sizes = [1.0, 2.0], (3, 4)
    ...     return x * table[n] + sizes[0]
    >>> sorted(_local_containers(forward.__code__))
    ['table']
    """
    found = instructions(code)
    loads = ((place, one) for place, one in enumerate(found) if one.opname.startswith(("LOAD_FAST", "LOAD_DEREF")))
    kept: set[str] = set()
    for place, one in loads:
        if isinstance(one.argval, tuple) or use_of(found, place) in ("container", None):
            kept.update(one.argval if isinstance(one.argval, tuple) else (one.argval,))
    return frozenset(kept)


def _named(frame: FrameType) -> Iterator[Any]:
    """The objects that code can reach by its names: local variables, globals, and attributes of these."""
    code = frame.f_code
    names = [name for name in code.co_names if name not in _only_compared(code)]
    local = (value for name, value in frame.f_locals.items() if name not in _only_compared(code))
    near = [*local, *(frame.f_globals[name] for name in names if name in frame.f_globals)]
    for of in near:
        held = getattr(of, "__dict__", {})
        attributes = [held[name] for name in names if name in held]
        yield from attributes
        for inner in (*attributes, type(of)):
            further = getattr(inner, "__dict__", {})
            yield from (further[name] for name in names if name in further)
    yield from near


@functools.lru_cache(maxsize=4096)
def _only_compared(code: CodeType) -> frozenset[str]:
    """Names that code only compares with constants, such as a mode.

    >>> def of(code): return sorted(_only_compared(compile(code, "", "eval")))
    >>> of("mode == 'greedy'"), of("self.mode in ('a', 'b')"), of("mode[n] == 'a'"), of("[mode == 'a', mode]")
    (['mode'], ['mode'], [], [])
    """
    found = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "EXTENDED_ARG")]
    compared: set[str] = set()
    otherwise: set[str] = {*code.co_cellvars, *code.co_freevars}
    for one, second, third in zip(found, found[1:], found[2:], strict=False):
        is_compared = second.opname == "LOAD_CONST" and third.opname in ("COMPARE_OP", "CONTAINS_OP")
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        if one.opname in ("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR") and is_compared:
            compared.add(one.argval)
        elif one.opname != "LOAD_CONST":
            otherwise.update(name for name in names if isinstance(name, str))
    return frozenset(compared - otherwise)
