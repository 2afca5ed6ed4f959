"""The user's file and line that an operator comes from.

The innermost Python frame outside torch, outside this package and outside generated code is the line that a user would
name. Verdicts on file names are remembered: asking costs about a microsecond an operator.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from functools import lru_cache
from types import FrameType

import torch

_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_FRAME = re.compile(r'^  File "(.*)", line (\d+)', re.MULTILINE)
_RUN_NODE = torch.fx.Interpreter.run_node.__code__
_STANDARD = os.path.dirname(os.__file__) + os.sep


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether a line of this file is one that the user wrote (or at least installed).

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

    Where a traced graph is interpreted, that is the frame its node was traced in.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _RUN_NODE and (line := _line_traced(frame.f_locals["n"].meta.get("stack_trace") or "")):
            return line
        if is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@lru_cache(maxsize=4096)
def _line_traced(stack: str) -> str:
    """The innermost user's line in a stack as it is printed.

    >>> _line_traced('  File "/home/me/model.py", line 5, in forward\\n    y = self.layer(x)')
    'model.py:5'
    """
    found = [(name, line) for name, line in _FRAME.findall(stack) if is_users(name)]
    return f"{os.path.basename(found[-1][0])}:{found[-1][1]}" if found else ""


def line_of(error: BaseException) -> str:
    """The user's line in an exception's traceback, as :func:`user_line` spells it."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(entry.filename):
            return f"{os.path.basename(entry.filename)}:{entry.lineno}"
    return ""
