"""The user's file and line of an operator.

This is the innermost Python frame outside of torch, of this package and of generated code. Whether a file is the user's
is stored: asking costs about a microsecond for each operator. Within ``modules_of``, lines also know the running
module.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_FUSE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, _FUSE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+)', re.MULTILINE)
_RUN_NODE = torch.fx.Interpreter.run_node.__code__
_STANDARD = os.path.dirname(os.__file__) + os.sep


class Line(str):
    """A line as in reports, ``"model.py:41"``, with the path of its file and the running module.

    >>> line = line_at("/home/me/model.py", 41, "encoder.layers.3")
    >>> line, line.path, line.number, line.module
    ('model.py:41', '/home/me/model.py', 41, 'encoder.layers.3')
    """

    path: str
    number: int
    module: str


@lru_cache(maxsize=65536)
def line_at(path: str, number: int, module: str = "") -> Line:
    """The line with that number in the file at ``path``."""
    line = Line(f"{os.path.basename(path)}:{number}")
    line.path, line.number, line.module = path, number, module
    return line


class _CurrentModule(threading.local):
    """The path of the module that this thread runs; empty outside of ``modules_of``."""

    module = ""


_running = _CurrentModule()


@contextlib.contextmanager
def modules_of(model: nn.Module) -> Iterator[None]:
    """A context in which lines know which module of ``model`` is running.

    >>> lines = []
    >>> class Noted(nn.Identity):
    ...     def forward(self, x):
    ...         lines.append(_running.module)
    >>> with modules_of(model := nn.Sequential(nn.Sequential(Noted()))):
    ...     _ = model(1)
    >>> lines
    ['0.0']
    """
    names = {id(module): name for name, module in model.named_modules()}
    outer: list[str] = []
    thread = threading.get_ident()  # the hooks run in all threads

    def enter(module: nn.Module, _args: Any) -> None:
        if threading.get_ident() == thread:
            outer.append(_running.module)
            _running.module = names.get(id(module), _running.module)

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        if threading.get_ident() == thread:
            _running.module = outer.pop() if outer else ""

    hooks = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        _running.module = ""
        for hook in hooks:
            hook.remove()


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether the user wrote (or at least installed) this file.

    >>> is_users(torch.__file__), is_users("/home/me/model.py"), is_users("<string>")
    (False, True, False)
    """
    if filename.startswith(("<frozen", "<string", "<eval_with")):
        return False
    if filename.startswith(_STANDARD) and "site-packages" not in filename:
        return False
    return not filename.startswith(_INTERNAL)


def user_line() -> str:
    """``"model.py:41"`` for the caller's innermost user frame, or ``""``.

    While a traced graph is interpreted, this is the line in which the node was traced.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        known = _lines.get(id(code)) or _lines_of(code)
        lines = known[1]
        if lines is not None:
            at = frame.f_lasti, _running.module
            line = lines.get(at)
            if line is None:
                line = lines[at] = line_at(code.co_filename, frame.f_lineno, at[1])
            return line
        if code is _RUN_NODE and (traced := line_traced(frame.f_locals["n"].meta.get("stack_trace") or "")):
            return traced
        frame = frame.f_back
    return ""


_Lines = tuple[CodeType, dict[tuple[int, str], Line] | None]
_lines: dict[int, _Lines] = {}
"""``id`` of a code object -> the object, and its lines by instruction and module; None if it is not the user's code."""
_MOST_CODE = 16384
"""Code objects in ``_lines`` before it is emptied: code made at run time must not stay in memory for good."""


def _lines_of(code: CodeType) -> _Lines:
    if len(_lines) >= _MOST_CODE:
        _lines.clear()
    found: _Lines = code, {} if is_users(code.co_filename) else None
    _lines[id(code)] = found
    return found


@lru_cache(maxsize=4096)
def line_traced(stack: str) -> str:
    """The innermost user's line in a printed stack.

    >>> line_traced('  File "/home/me/model.py", line 5, in forward\\n    y = self.layer(x)')
    'model.py:5'
    """
    found = [(name, line) for name, line in _FRAME.findall(stack) if is_users(name)]
    return line_at(found[-1][0], int(found[-1][1])) if found else ""


def raised_by_user(error: BaseException) -> bool:
    """Whether the user's code, or an operator that it calls, raised ``error``.

    Behind the user's last frame, fuse has none but those of modes that watch operators.
    """
    entries = traceback.extract_tb(error.__traceback__)
    last = max((i for i, entry in enumerate(entries) if is_users(entry.filename)), default=len(entries))
    own = [entry.name for entry in entries[last:] if entry.filename.startswith(_FUSE)]
    return last < len(entries) and set(own) <= {"__torch_dispatch__", "__torch_function__"}


def line_of(error: BaseException) -> str:
    """The user's line in an exception's traceback, as in :func:`user_line`."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(entry.filename):
            return f"{os.path.basename(entry.filename)}:{entry.lineno}"
    return ""
