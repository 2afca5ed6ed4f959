"""Shared parts of loop kernels in C++: their arguments, their workspace, and the pointers of one step.

args:  operands, results, workspace, sizes (the trip count, strides over time)

States take turns in two places of the workspace, so that ``h`` and ``h_next`` change roles in every step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from fuse.kernel.cpu import cpp_types
from fuse.kernel.extents import varies
from fuse.kernel.index import ZERO
from fuse.kernel.loop_nests import Frame, elements, operand_name, result_name
from fuse.kernel.loop_stages import Kept, StepProduct
from fuse.kernel.placement import StridedPlace
from fuse.kernel.values import Input

ALIGNMENT = 64


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
class ThreadFunction:
    """What one thread does: ``text`` defines the function, which needs ``workspace`` bytes.

    At most ``threads`` pay. With ``work``, that much in a step, so many steps may be too few for all of them.
    ``schedule`` says in words what threads share out.
    """

    text: str
    workspace: int
    threads: int
    schedule: str
    work: int | None = None


def pointers(frame: Frame, workspace: Workspace) -> list[str]:
    """Lines that name every argument and all of the workspace that states and stages need."""
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
    """Lines that name sizes: all of them, or those with these names."""
    argument = len(frame.operands) + len(frame.results) + 1
    lines = [f"const int64_t *sizes = (const int64_t *)args[{argument}];"]
    named = (pair for pair in enumerate(frame.sizes) if names is None or pair[1].name in names)
    return [*lines, *(f"const int64_t {size} = sizes[{number}];" for number, size in named)]


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


def stage_memory(frame: Frame, workspace: Workspace, stages: Iterable[StepProduct | Kept]) -> None:
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
