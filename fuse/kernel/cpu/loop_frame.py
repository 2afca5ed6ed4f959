"""Parts of C++ loop kernels that all schedules share: arguments, workspace, and the pointers of one step.

args:  operands, results, workspace, sizes (the trip count, strides over time)

Each state has two buffers in the workspace; ``h`` and ``h_next`` swap in every step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from fuse.kernel.arithmetic.extents import varies
from fuse.kernel.arithmetic.index import ZERO
from fuse.kernel.cpu import cpp_types
from fuse.kernel.cpu.product_frame import aligned
from fuse.kernel.loops.loop_nests import Frame, elements, operand_name, result_name
from fuse.kernel.loops.loop_stages import Kept, StepProduct
from fuse.kernel.placement import StridedPlace
from fuse.kernel.values import Input


def indented(depth: int, lines: Sequence[str]) -> list[str]:
    """The lines, indented by ``depth`` levels."""
    return ["    " * depth + line for line in lines]


@dataclass
class Workspace:
    """Allocator of aligned parts of a kernel's workspace: their C++ declarations, and the total ``size`` in bytes."""

    size: int = 0
    lines: list[str] = field(default_factory=list)
    last: str = "workspace"

    def take(self, name: str, ctype: str, elements: int, itemsize: int) -> None:
        """Declare ``name``, a pointer to ``elements`` of ``ctype``."""
        if varies(self.size):  # an offset that sums up all sizes before it would be long
            self.lines.append(f"{ctype} *{name} = ({ctype} *)fuse_aligned((char *)({self.last}));")
        else:
            self.lines.append(f"{ctype} *{name} = ({ctype} *)(workspace + {self.size});")
        self.last = f"{name} + {elements}"
        self.size += aligned(elements * itemsize)


@dataclass(frozen=True)
class ThreadFunction:
    """The C++ function ``text`` that each thread of a loop kernel runs.

    ``workspace`` is the bytes that all threads need together. More than ``threads`` threads do not pay. ``work``, if
    given, is the work of one step (:func:`fuse.kernel.cpu.work.work`); few steps pay for fewer threads. ``schedule`` is
    a sentence that says what threads share out.
    """

    text: str
    workspace: int
    threads: int
    schedule: str
    work: int | None = None


def pointers(frame: Frame, workspace: Workspace) -> list[str]:
    """Lines that declare all arguments; allocates the buffers of the states in ``workspace``."""
    lines = []
    for position, operand in enumerate(frame.operands):
        ctype = cpp_types.storage(operand.dtype)
        lines.append(f"const {ctype} *{operand_name(frame, position)} = (const {ctype} *)args[{position}];")
    for number, result in enumerate(frame.results):
        ctype = cpp_types.storage(result.dtype)
        lines.append(f"{ctype} *{result_name(frame, number)} = ({ctype} *)args[{len(frame.operands) + number}];")
    last = len(frame.operands) + len(frame.results)
    lines.append(f"char *workspace = fuse_aligned(args[{last}]);")
    lines += reads_sizes(frame)
    for state in frame.states:
        workspace.take(
            f"{frame.name(state)}_memory", cpp_types.storage(state.dtype), 2 * elements(state), state.dtype.itemsize
        )
    return lines


def reads_sizes(frame: Frame, names: Container[str] | None = None) -> list[str]:
    """Lines that declare the sizes: all of them, or those with these names."""
    argument = len(frame.operands) + len(frame.results) + 1
    lines = [f"const int64_t *sizes = (const int64_t *)args[{argument}];"]
    named = (pair for pair in enumerate(frame.sizes) if names is None or pair[1].name in names)
    return [*lines, *(f"const int64_t {size} = sizes[{number}];" for number, size in named)]


def step_pointers(frame: Frame) -> list[str]:
    """Lines that declare the states, inputs and results of step ``t``."""
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
    """Lines that declare the buffers of a state at step ``time`` and at the next step."""
    ctype, name, size = cpp_types.storage(state.dtype), frame.name(state), elements(state)
    return [
        f"const {ctype} *{name} = {name}_memory + ({time} & 1) * {size};",
        f"{ctype} *{name}_next = {name}_memory + (~{time} & 1) * {size};",
    ]


def stage_memory(frame: Frame, workspace: Workspace, stages: Iterable[StepProduct | Kept]) -> None:
    """Allocate workspace for the results of stages."""
    for stage in stages:
        result = stage.result
        workspace.take(frame.name(result), cpp_types.storage(result.dtype), elements(result), result.dtype.itemsize)


def packing(
    target: str, panels: int, panel: int, matrix: StridedPlace, name: str, depth: int, column: str, columns: int
) -> str:
    """The C++ call that packs one panel of a weight, the columns from ``column`` on; ``columns`` is the matrix's
    width."""
    source = name if matrix.start == ZERO else f"{name} + {matrix.start}"
    strides = f"{matrix.strides[0]}, {matrix.strides[1]}"
    where = f"{target} + {16 * panel}" if panel else target
    return f"fuse_pack({where}, {16 * panels}, {source}, {strides}, {depth}, {column}, {columns});"


def waiting(share: str, count: int) -> list[str]:
    """Lines that wait at the barrier. If the other threads were sent away, this thread takes all shares up to
    ``count``."""
    return ["if (!team->wait(member)) return 0;", f"if (team->members == 1) last_{share} = {count};"]
