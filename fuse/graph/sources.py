"""The user's file and line that an operator comes from.

The innermost Python frame outside torch, outside this package and outside generated code is the line that a user would
name. Verdicts on file names are remembered: asking costs about a microsecond an operator.
"""

from __future__ import annotations

import os
import sys
import traceback
from functools import lru_cache

import torch

_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
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
    """``"model.py:41"`` for the caller's innermost user frame, or ``""``."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def line_of(error: BaseException) -> str:
    """The user's line in an exception's traceback, as :func:`user_line` spells it."""
    for entry in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(entry.filename):
            return f"{os.path.basename(entry.filename)}:{entry.lineno}"
    return ""
