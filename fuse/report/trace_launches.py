"""The launches of a trace: which operators and kernels ran, of which kind, and where the user's code asked for them.

    forward (user's function)             line
      aten::linear        composite       no launch, look inside
        aten::t           view            no launch
        aten::addmm       gemm            one launch; what it calls inside is part of it
      fuse::loop NAME at model.py:38      one launch of kind loop

On a processor an operator is a launch, as in ``fuse show``'s *before*. Where the trace has kernels of a device, those
are the launches, and the operator around each says its kind; a kernel that no operator is known of is told by its name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from fuse import ops
from fuse.report.trace_events import ANNOTATION, DEVICE, OPERATOR, PYTHON, RUNTIME, Event

OWN = re.compile(r"fuse::(?P<kind>\w+) (?P<name>\S+)(?: at (?P<line>.+))?$")
_GENERATED = re.compile(r"(^|_)(cpp|triton)_\w*fused")
_LIBRARY = re.compile(
    r"^(<|nn\.Module: )|(^|/)(torch|fuse|lib/python3[.\d]*|site-packages)/"
    r"|^(runpy|threading)\.py|(^|/)c[a-z2-7]{51}\.py"
)
"""Python functions that are no user's: of libraries, and of the files that torch.compile generates, named by a hash."""
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
"""What the names of kernels on devices say, the first that fits; of libraries' kernels there is no list."""


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
        """When it was over."""
        return self.start + self.duration


@dataclass(frozen=True)
class TraceRecording:
    """What is read from a trace: launches in the order of time, the user's annotations, and time spent launching."""

    launches: tuple[Launch, ...]
    annotations: tuple[Event, ...]
    on_device: bool
    launching: float


@dataclass(frozen=True)
class _Known:
    """What the name of an operator says: look inside it, or count its launches."""

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
    """Walk the nested events of a thread; ``owners`` learns which launch each operator is part of."""
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
    """A kernel on a device: of the kind of its operator, else of what its name says."""
    owner = owners.get(event.correlation) if event.correlation is not None else None
    moves = event.category != "kernel"
    kind = "movement" if moves else owner.kind if owner is not None and owner.known else kind_of_kernel(event.name)
    source = owner.source if owner is not None else ""
    return Launch(
        event.name, kind or "other", source, event.start, event.duration, event.where, moves or kind is not None
    )


def kind_of_kernel(name: str) -> ops.Kind | None:
    """What the name of a kernel on a device says of its kind.

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
    """What is known of the operator of this name, as the profiler spells it, without its overload."""
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
