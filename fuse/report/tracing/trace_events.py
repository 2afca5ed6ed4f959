"""The events of a Chrome trace that ``torch.profiler`` wrote, read one after another.

    {"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "ts": 1.5, "dur": 3.0, "args": {...}}   ->   Event

A trace of a training run has hundreds of megabytes. A stream decodes it event by event, so that memory holds only the
needed fields, and time is linear in the file's size.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fuse.errors import FuseError

OPERATOR, PYTHON, ANNOTATION = "cpu_op", "python_function", "user_annotation"
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime"})
_KEPT = frozenset({OPERATOR, PYTHON, ANNOTATION, *DEVICE, *RUNTIME})
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Event:
    """An event of ``duration`` microseconds that begins at ``start``, in a thread or on a stream (``where``).

    ``correlation`` is the number that a launch on a device shares with the operator that made it (``External id``).
    """

    category: str
    name: str
    start: float
    duration: float
    where: tuple[Any, Any]
    correlation: int | None

    @property
    def end(self) -> float:
        """The time of its end, in microseconds."""
        return self.start + self.duration


def events(path: Path) -> Iterator[Event]:
    """The events of a trace, in the order of the file; ``FuseError`` for a file that is no trace."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if _is_gzip(path) else open(path, encoding="utf-8") as stream:
            for raw in _objects(stream, path):
                if (event := _event(raw)) is not None:
                    yield event
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FuseError(f"cannot read {path}: {reason}; write one with torch.profiler's export_chrome_trace") from error


def _is_gzip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _event(raw: Any) -> Event | None:
    """A complete event (``ph`` X) of a needed category, or None."""
    if not isinstance(raw, dict) or raw.get("ph") != "X" or raw.get("cat") not in _KEPT:
        return None
    args = raw.get("args") or {}
    where = (raw.get("pid"), raw.get("tid"))
    correlation = args.get("External id", args.get("correlation"))
    try:
        number = None if correlation is None else int(correlation)
        start, duration = float(raw["ts"]), float(raw.get("dur", 0))
    except (KeyError, TypeError, ValueError):
        return None
    return Event(raw["cat"], str(raw.get("name", "")), start, duration, where, number)


def _objects(stream: IO[str], path: Path) -> Iterator[Any]:
    """The objects of the list ``traceEvents``, or of a file that is such a list."""
    decode = json.JSONDecoder().raw_decode
    buffer = stream.read(_CHUNK)
    at = _first(buffer)
    while at is None:  # the text before the events may be long
        more = stream.read(_CHUNK)
        if not more:
            raise FuseError(f"{path} is not a Chrome trace: it has no traceEvents; write one with torch.profiler")
        buffer += more
        at = _first(buffer)
    wanted = _CHUNK
    while True:
        while at < len(buffer) and buffer[at] in " \t\r\n,":
            at += 1
        if at < len(buffer) and buffer[at] == "]":
            return
        try:
            if at == len(buffer):
                raise ValueError
            value, at = decode(buffer, at)
            wanted = _CHUNK
        except ValueError:
            more = stream.read(wanted)
            if not more:
                raise FuseError(f"{path} is not a Chrome trace, or is cut off: its events end in the middle") from None
            buffer, at, wanted = buffer[at:] + more, 0, wanted * 2
            continue
        yield value


def _first(buffer: str) -> int | None:
    """The position of the first event."""
    if buffer.lstrip()[:1] == "[":
        return buffer.index("[") + 1
    key = buffer.find('"traceEvents"')
    opened = buffer.find("[", key) if key >= 0 else -1
    return opened + 1 if opened >= 0 else None
