"""The launches of a trace: operators and kernels, with their kinds and user lines.

    forward (user's function)             line
      aten::linear        composite       no launch; its inner operators count
        aten::t           view            no launch
        aten::addmm       gemm            one launch, which includes its inner calls
      fuse::loop NAME at model.py:38      one launch of kind loop

On a processor an operator is a launch, as in ``fuse show``'s *before*. Where the trace has kernels of a device, those
are the launches. The operator around a kernel gives its kind; without a known operator, the kernel's name does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from fuse import ops
from fuse.report.tracing.trace_events import ANNOTATION, DEVICE, OPERATOR, PYTHON, RUNTIME, Event

OWN = re.compile(r"fuse::(?P<kind>\w+) (?P<name>\S+)(?: at (?P<line>.+))?$")
_GENERATED = re.compile(r"(^|_)(cpp|triton)_\w*fused")
_LIBRARY = re.compile(
    r"^(<|nn\.Module: )|(^|/)(torch|fuse|lib/python3[.\d]*|site-packages)/"
    r"|^(runpy|threading)\.py|(^|/)c[a-z2-7]{51}\.py"
)
"""Python functions that are not the user's: those of libraries, and of torch.compile's files, named by a hash."""
_FUNCTION = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
_BY_NAME: tuple[tuple[str, ops.Kind], ...] = (
    ("fprop|dgrad|wgrad|convolve|conv2d|conv3d|winograd|im2col|[sh]cudnn_", "convolution"),
    ("gemm|gemv|cutlass|cublas|xmma|nvjet|splitk|wmma|matmul|dot_kernel|flash|fmha", "gemm"),
    (
        "triton_(red|per)_|reduce|softmax|norm|argmax|argmin|cumsum|scan|sort|topk|pool|moments|welford|gammabeta",
        "reduction",
    ),
    ("distribution|philox|dropout|random", "random"),
    ("memcpy|memset|copy|cat|index|gather|scatter|transpose|embedding|fill|nchwtonhwc|nhwctonchw", "movement"),
    ("elementwise|triton_poi_|pointwise|vectorized|multi_tensor_apply", "pointwise"),
)
"""Kinds by the names of kernels on devices, the first match counts; libraries publish no list of names."""

BENCH = "fuse bench: "
"""The prefix of the annotation that ``fuse bench --profile`` puts around a contender's call."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: ``source`` is a user's ``file:line`` (in a trace of torch the line where the function begins)."""

    name: str
    kind: ops.Kind
    source: str
    start: float
    duration: float
    where: tuple[object, object]
    known: bool = True

    @property
    def end(self) -> float:
        """The time of its end, in microseconds."""
        return self.start + self.duration


@dataclass(frozen=True)
class TraceRecording:
    """The contents of a trace: launches in order of time, the user's annotations, and microseconds spent launching."""

    launches: tuple[Launch, ...]
    annotations: tuple[Event, ...]
    on_device: bool
    launching: float


@dataclass(frozen=True)
class _Known:
    """Facts by an operator's name: whether its inner operators count, or how many launches it has."""

    inside: bool
    kind: ops.Kind = "other"
    launches: int = 1
    known: bool = True


def recording(events: Iterable[Event]) -> TraceRecording:
    """The launches among the events of a trace."""
    threads: dict[tuple[object, object], list[Event]] = defaultdict(list)
    device: list[Event] = []
    annotations: list[Event] = []
    launching = 0.0
    for event in events:
        if event.category in DEVICE:
            device.append(event)
        elif event.category in RUNTIME:
            launching += event.duration if "Launch" in event.name else 0.0
        elif event.category == PYTHON:
            if _LIBRARY.search(event.name) is None:
                threads[event.where].append(event)
        else:
            threads[event.where].append(event)
            if event.category == ANNOTATION:
                annotations.append(event)
    made: list[Launch] = []
    owners: dict[int, Launch] = {}
    for happened in threads.values():
        made += _of_thread(happened, owners)
    if device:
        made = [_of_device(event, owners) for event in device]
    made.sort(key=lambda launch: launch.start)
    annotations.sort(key=lambda event: event.start)
    return TraceRecording(tuple(made), tuple(annotations), bool(device), launching)


def _of_thread(happened: list[Event], owners: dict[int, Launch]) -> Iterator[Launch]:
    """Walk the nested events of a thread; adds the launch that contains each operator to ``owners``."""
    happened.sort(key=lambda event: (event.start, -event.duration))
    functions: list[tuple[float, str]] = []
    lines: list[tuple[float, str]] = []
    current: Launch | None = None
    for event in happened:
        while functions and functions[-1][0] <= event.start:
            functions.pop()
        while lines and lines[-1][0] <= event.start:
            lines.pop()
        if current is not None and event.start >= current.end:
            current = None
        if event.category == PYTHON:
            functions.append((event.end, _place(event.name)))
        elif event.category == OPERATOR:
            if current is None:
                source = (lines or functions or [(0.0, "")])[-1][1]
                own = OWN.match(event.name)
                if own is not None and own["kind"] == "call":
                    lines.append((event.end, own["line"] or source))
                    continue
                said = _own(own["kind"]) if own is not None else _operator(event.name)
                source = (own["line"] or source) if own is not None else source
                if said.inside:
                    continue
                name = own["name"] if own is not None else event.name
                current = Launch(name, said.kind, source, event.start, event.duration, event.where, said.known)
                for _ in range(said.launches):
                    yield current
            if event.correlation is not None:
                owners[event.correlation] = current


def _of_device(event: Event, owners: dict[int, Launch]) -> Launch:
    """A kernel on a device, with the kind of its operator, else the kind by its name."""
    owner = owners.get(event.correlation) if event.correlation is not None else None
    moves = event.category != "kernel"
    kind = "movement" if moves else owner.kind if owner is not None and owner.known else kind_of_kernel(event.name)
    source = owner.source if owner is not None else ""
    return Launch(
        event.name, kind or "other", source, event.start, event.duration, event.where, moves or kind is not None
    )


def kind_of_kernel(name: str) -> ops.Kind | None:
    """The kind of a device kernel by its name, or None.

    >>> kind_of_kernel("void at::native::vectorized_elementwise_kernel<4, at::native::tanh_kernel_cuda>")
    'pointwise'
    >>> kind_of_kernel("ampere_sgemm_128x64_tn"), kind_of_kernel("my_kernel")
    ('gemm', None)
    """
    lowered = name.lower()
    return next((kind for pattern, kind in _BY_NAME if re.search(pattern, lowered)), None)


def _own(kind: str) -> _Known:
    known: ops.Kind = next((one for one in ops.REPORTED_KINDS if one == kind), "other")
    return _Known(False, known)


@cache
def _operator(name: str) -> _Known:
    """Facts of the operator with this name, in the profiler's spelling, without its overload."""
    if _GENERATED.search(name):
        return _Known(False, "region")
    namespace, _, base = name.partition("::")
    if not base or namespace in ("autograd", "profiler", "prim", "fuse"):
        return _Known(True)
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        return _Known(False, known=False)
    overloads = list(_overloads(packet))
    usual = [op for op in overloads if "Dimname" not in str(op._schema) and not op._overloadname.endswith("out")]
    usual = usual or overloads
    if all(ops.is_composite(op) for op in usual):
        return _Known(True)
    facts = next((found for op in usual if (found := ops.info(op)) is not None), None)
    return _Known(False, facts.kind, facts.launches) if facts is not None else _Known(False, known=False)


def _overloads(packet: torch._ops.OpOverloadPacket) -> Iterator[torch._ops.OpOverload]:
    """The overloads that can be called: some of ``aten::to`` are TorchScript's alone."""
    for name in packet.overloads():
        op = getattr(packet, name)
        if torch._C._dispatch_has_kernel(op.name()):
            yield op


def _place(name: str) -> str:
    """``file:line`` of a function of the user's."""
    found = _FUNCTION.match(name)
    return f"{found['file'].rpartition('/')[2]}:{found['line']}" if found is not None else ""
