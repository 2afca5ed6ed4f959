"""What all loop kernels share: memory, pointers, and the nests of one step.

args:  operands, results, workspace, sizes (the trip count, strides over time)
state  h:     h_start (operand)  ->  h, h_next (workspace, change places every step)  ->  h_last (result)
input  x:     x_steps (operand)  ->  x (this step's part)
result y:     y_steps (result)   ->  y (this step's place)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from fuse.graph.loop import LoopSpec
from fuse.kernel.cpu import cpp_types
from fuse.kernel.extents import varies
from fuse.kernel.index import ZERO, Affine, NotAffine, Size, Stride, contiguous_strides
from fuse.kernel.ir import Buffer, Loop, Scope, Statement, Store
from fuse.kernel.loop_sizes import sizes_of, strides_in
from fuse.kernel.loop_stages import Kept, Product, StepValues
from fuse.kernel.placement import StridedPlace
from fuse.kernel.schedule import schedule
from fuse.kernel.values import Concat, Input, Output, Program, Value

ALIGNMENT = 64

MOST_PIECES = 16
"""Pieces of concatenations that are stored by the nests of other results: many are written one after another."""


def indented(depth: int, lines: Sequence[str]) -> list[str]:
    """Lines of C++, ``depth`` levels in."""
    return ["    " * depth + line for line in lines]


@dataclass
class Workspace:
    """Memory handed out in aligned pieces; ``size`` in bytes."""

    size: int = 0
    lines: list[str] = field(default_factory=list)
    last: str = "workspace"

    def take(self, name: str, ctype: str, elements: int, itemsize: int) -> None:
        """Declare ``name``, a pointer to ``elements`` of ``ctype``."""
        if varies(self.size):  # the sum of what was taken would be long
            self.lines.append(f"{ctype} *{name} = ({ctype} *)fuse_aligned((char *)({self.last}));")
        else:
            self.lines.append(f"{ctype} *{name} = ({ctype} *)(workspace + {self.size});")
        self.last = f"{name} + {elements}"
        self.size += -(-elements * itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Frame:
    """A loop about to be written down: its step, how it is driven, and the tensors around it.

    ``told`` are sizes that vary between calls, beside those of every loop.
    """

    step: StepValues
    spec: LoopSpec
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    told: tuple[Size, ...] = ()

    @property
    def states(self) -> tuple[Input, ...]:
        return self.step.inputs[: self.spec.carries]

    @property
    def sizes(self) -> tuple[Size, ...]:
        """What the kernel is told in every call, in this order."""
        names = [self.step.names[position] for position in range(len(self.operands))]
        own = sizes_of(self.spec, self.operands, self.results, names, self.step.result_names)
        return (*own, *self.told)

    def reads_sizes(self, names: Container[str] | None = None) -> list[str]:
        """Lines that name sizes: all of them, or those with these names."""
        argument = len(self.operands) + len(self.results) + 1
        lines = [f"const int64_t *sizes = (const int64_t *)args[{argument}];"]
        named = (pair for pair in enumerate(self.sizes) if names is None or pair[1].name in names)
        return [*lines, *(f"const int64_t {size} = sizes[{number}];" for number, size in named)]

    def name(self, value: Input) -> str:
        return self.step.names[value.position]


@dataclass(frozen=True)
class ThreadFunction:
    """What one thread does: ``text`` defines the function, which needs ``workspace`` bytes.

    At most ``threads`` pay. With ``work``, that much in a step, so many steps may be too few for all of them.
    """

    text: str
    workspace: int
    threads: int
    work: int | None = None


def elements(value: Input) -> int:
    """Elements of memory of our own that ``value`` takes, padding included."""
    return value.shape[0] * known(value.strides[0]) if value.shape else 1


def known(stride: Stride) -> int:
    """A stride in memory of our own, which does not differ from call to call."""
    assert isinstance(stride, int)
    return stride


def pointers(frame: Frame, workspace: Workspace) -> list[str]:
    """Lines that name every argument and all of the workspace that states and stages need."""
    spec, step = frame.spec, frame.step
    lines = []
    for position, operand in enumerate(frame.operands):
        suffix = (
            "_start" if position < spec.carries else "_steps" if position < spec.carries + len(spec.step_inputs) else ""
        )
        ctype = cpp_types.storage(operand.dtype)
        lines.append(f"const {ctype} *{step.names[position]}{suffix} = (const {ctype} *)args[{position}];")
    for number, result in enumerate(frame.results):
        ctype = cpp_types.storage(result.dtype)
        name = f"{step.names[number]}_last" if number < spec.carries else f"{step.result_names[number]}_steps"
        lines.append(f"{ctype} *{name} = ({ctype} *)args[{len(frame.operands) + number}];")
    last = len(frame.operands) + len(frame.results)
    lines.append(f"char *workspace = fuse_aligned(args[{last}]);")
    lines += frame.reads_sizes()
    for state in frame.states:
        workspace.take(
            f"{frame.name(state)}_memory", cpp_types.storage(state.dtype), 2 * elements(state), state.dtype.itemsize
        )
    return lines


def step_pointers(frame: Frame) -> list[str]:
    """Lines that name this step's states, inputs and places of results, given the step ``t``."""
    spec, step = frame.spec, frame.step
    lines = []
    for state in frame.states:
        lines += state_pointers(frame, state, "t")
    for position in range(spec.carries, spec.carries + len(spec.step_inputs)):
        ctype, name = cpp_types.storage(frame.operands[position].dtype), step.names[position]
        lines.append(f"const {ctype} *{name} = {name}_steps + {name}_first + t * {name}_pace;")
    for number in range(spec.carries, len(frame.results)):
        result, name = frame.results[number], step.result_names[number]
        first = f"{name}_first + " if spec.backwards else ""
        lines.append(f"{cpp_types.storage(result.dtype)} *{name} = {name}_steps + {first}t * {name}_pace;")
    return lines


def state_pointers(frame: Frame, state: Input, time: str) -> list[str]:
    """The state as it is at ``time``, and where the next one goes."""
    ctype, name, size = cpp_types.storage(state.dtype), frame.name(state), elements(state)
    return [
        f"const {ctype} *{name} = {name}_memory + ({time} & 1) * {size};",
        f"{ctype} *{name}_next = {name}_memory + (~{time} & 1) * {size};",
    ]


@dataclass(frozen=True)
class Destination:
    """``value`` goes to the memory named ``name`` with these strides (elements), from element ``start`` on."""

    value: Value
    name: str
    strides: tuple[Stride, ...]
    start: Affine = ZERO

    def pieces(self) -> list[Destination]:
        """The same as one destination for each piece of a concatenation."""
        if not isinstance(self.value, Concat):
            return [self]
        found, start = [], self.start
        for piece in self.value.pieces:
            found += replace(self, value=piece, start=start).pieces()
            start += Affine((), piece.shape[self.value.dim]).times(self.strides[self.value.dim])
        return found


def results_of(frame: Frame) -> list[Destination]:
    """Where the step's results go: next states, then what is collected."""
    step, carries = frame.step, frame.spec.carries
    found = []
    for number, value in enumerate(step.results):
        if number < carries:
            found.append(Destination(value, f"{step.names[number]}_next", step.inputs[number].strides))
        else:
            name = step.result_names[number]
            found.append(Destination(value, name, strides_in(frame.results[number], name, without=0)))
    return found


def starts_of(frame: Frame) -> tuple[list[Input], dict[int, str], list[Destination]]:
    """The copies of the operands' states into memory of our own: what is read, its names, where it goes."""
    names = {s.position: f"{frame.name(s)}_start" for s in frame.states}
    sources = [
        Input(s.shape, s.dtype, s.position, strides_in(frame.operands[s.position], names[s.position]))
        for s in frame.states
    ]
    return sources, names, [Destination(s, f"{frame.name(s)}_memory", contiguous_strides(s.shape)) for s in sources]


def lasts_of(frame: Frame) -> list[Destination]:
    """The copies of the last states to the results."""
    names = [f"{frame.name(s)}_last" for s in frame.states]
    results = [frame.results[s.position] for s in frame.states]
    return [Destination(s, n, strides_in(r, n)) for s, n, r in zip(frame.states, names, results, strict=True)]


def nest(
    inputs: Sequence[Input],
    names: Mapping[int, str],
    destinations: Sequence[Destination],
    value_names: Mapping[int, str],
) -> list[Statement]:
    """The loops that compute and store ``destinations``.

    Pieces of a concatenation are results like any other where they are few: what several need is computed once.

    Raises:
        NotAffine: there are no such loops; the message is a reason.
    """

    def stored(destinations: Sequence[Destination]) -> list[Statement]:
        outputs = tuple(Output(d.value, d.strides) for d in destinations)
        body = schedule(Program(tuple(inputs), outputs, names, value_names))
        places = {f"out{i}": d for i, d in enumerate(destinations)}
        return [_renamed(s, places) for s in body.statements]

    pieces = [piece for destination in destinations for piece in destination.pieces()]
    if len(destinations) < len(pieces) <= len(destinations) + MOST_PIECES:
        with contextlib.suppress(NotAffine):
            return stored(pieces)
    return stored(destinations)


def _renamed(statement: Statement, places: Mapping[str, Destination]) -> Statement:
    if isinstance(statement, (Loop, Scope)):
        return replace(statement, body=tuple(_renamed(s, places) for s in statement.body))
    if isinstance(statement, Store) and statement.buffer.role == "output":
        buffer, place = statement.buffer, places[statement.buffer.name]
        offset = statement.offset + place.start
        return replace(statement, buffer=Buffer(place.name, buffer.dtype, buffer.role), offset=offset)
    return statement


def stage_memory(frame: Frame, workspace: Workspace, stages: Iterable[Product | Kept]) -> None:
    """Workspace for the results of stages."""
    for stage in stages:
        result = stage.result
        workspace.take(frame.name(result), cpp_types.storage(result.dtype), elements(result), result.dtype.itemsize)


def packing(
    target: str, panels: int, panel: int, matrix: StridedPlace, name: str, depth: int, column: str, columns: int
) -> str:
    """The call that packs one panel of a weight: columns from ``column`` on, up to ``columns`` of the matrix."""
    source = name if matrix.start == ZERO else f"{name} + {matrix.start}"
    strides = f"{matrix.strides[0]}, {matrix.strides[1]}"
    where = f"{target} + {16 * panel}" if panel else target
    return f"fuse_pack({where}, {16 * panels}, {source}, {strides}, {depth}, {column}, {columns});"


def waiting(share: str, count: int) -> list[str]:
    """Lines that wait for the other threads, and take what is theirs where they were sent away: up to ``count``."""
    return ["if (!team->wait(member)) return 0;", f"if (team->members == 1) last_{share} = {count};"]


def multiplications(frame: Frame) -> int:
    """Multiplications of one step's products."""
    products = [s for s in frame.step.stages if isinstance(s, Product)]
    return sum(math.prod(p.result.shape) * p.left.shape[1] for p in products)
