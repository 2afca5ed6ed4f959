"""A Chrome trace of one call of each contender of a bench."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fuse.errors import FuseError
from fuse.report.tracing.trace_launches import BENCH


def write_profile(path: Path, calls: Mapping[str, Callable[[], Any]]) -> None:
    """Call each once more under ``torch.profiler`` and write ``path`` (``.json`` or ``.json.gz``), whole or not at all.

    Each call is inside an annotation with its name, by which ``fuse trace`` separates them.
    """
    if not path.name.endswith((".json", ".json.gz")):
        raise FuseError(f"--profile {path} writes a Chrome trace; end its name with .json or .json.gz")
    for call in calls.values():  # the profiler's own first events are slow
        with silent(), profile(activities=[ProfilerActivity.CPU]):
            call()
        break
    with silent(), profile(activities=_activities(), with_stack=True) as recorded:
        for name, call in calls.items():
            with record_function(f"{BENCH}{name}"):
                call()
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        with silent():
            recorded.export_chrome_trace(str(temporary))
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        raise FuseError(f"cannot write {path}: {error}; give another file") from error
    finally:
        temporary.unlink(missing_ok=True)


def _activities() -> list[ProfilerActivity]:
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    return both if torch.cuda.is_available() else both[:1]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Silence the profiler's library, which writes to stderr past Python."""
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
