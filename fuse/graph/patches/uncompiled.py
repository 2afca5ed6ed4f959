"""Run functions made by ``torch.compile`` as they were written, while a call is recorded.

    self.act = torch.compile(act); self.act(x)      ->      act(x)

Dynamo would trace the recorder itself, and fail with messages of its own. A call inside a region that Dynamo compiles
is unchanged, because Dynamo does not start again there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from fuse.graph.patches.patched import patched


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which compiled functions run as plain functions; for one thread at a time.

    >>> double = torch.compile(lambda x: x * 2, backend="eager")
    >>> with uncompiled():
    ...     double(torch.ones(1))
    tensor([2.])
    """
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            _ignored(stack)
        else:  # no function is compiled yet, and importing Dynamo takes a second
            stack.enter_context(patched(torch, {"compile": _compiling(torch.compile, stack)}))
        yield


def _compiling(compiling: Any, stack: contextlib.ExitStack) -> Any:
    """``torch.compile`` for a model that calls it during the recording; it imports Dynamo."""

    def compile(*args: Any, **kwargs: Any) -> Any:
        made = compiling(*args, **kwargs)
        if torch.compile is compile:
            torch.compile = compiling
            _ignored(stack)
        return made

    return compile


def _ignored(stack: contextlib.ExitStack) -> None:
    if not get_eval_frame_callback():
        stack.enter_context(torch.compiler.set_stance("force_eager"))
