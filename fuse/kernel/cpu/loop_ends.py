"""Lower a loop and the small regions before and after it to one kernel.

    extern "C" int whole(char *const *args) {
        before(...)         one thread
        loop(...)           the threads of the loop
        return after(...);  one thread
    }

Values between the three are in the kernel's workspace. Their offsets are passed in each call, with the sizes of the
loop, so that the source is the same for any trip count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from fuse.graph.loop import Loop
from fuse.graph.loop_with_ends import LoopWithEnds
from fuse.graph.outputs import outputs_of
from fuse.graph.strides import extent
from fuse.kernel.arithmetic.index import Size
from fuse.kernel.cpu.emit import emit, with_sizes
from fuse.kernel.cpu.loop_kernel import loop_kernel
from fuse.kernel.cpu.names import is_reserved
from fuse.kernel.cpu.product_frame import ALIGNMENT, aligned
from fuse.kernel.cpu.work import is_parallel
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.loops.loop_sizes import strides_in
from fuse.kernel.lower import attempt, readable_name, structure
from fuse.kernel.names import fit_names
from fuse.kernel.nests.schedule import schedule
from fuse.kernel.recipes.products import products_below
from fuse.kernel.recipes.reading import computation_of
from fuse.kernel.target import LoopKernels

_ENTRY = 'extern "C" int {}('


def end_kernel(region: GraphModule) -> Kernel | Declined:
    """The kernel of a region before or after a loop, for one thread."""
    return attempt(lambda: _lowered_end(region))


def _lowered_end(region: GraphModule) -> Kernel | Declined:
    computation = fit_names(computation_of(region, strides_in), is_reserved)
    if products_below([output.value for output in computation.outputs]):
        return Declined("a region beside a loop has a matrix product, which is worth several threads")
    body = schedule(computation)
    if is_parallel(body):
        return Declined("a region beside a loop is worth several threads")
    name = f"{readable_name(region)}_{hashlib.sha256(structure(region).encode()).hexdigest()[:8]}"
    sizes = [s for value in computation.inputs for s in value.strides if isinstance(s, Size)]
    text = emit(body, name, "one")
    if sizes:
        text = with_sizes(text, [size.name for size in sizes], len(computation.inputs) + len(computation.outputs))
    values = tuple((size.name, size.value) for size in sizes)
    return Kernel(name, text, frozenset(), parallel=False, sizes=values)


def kernel_with_ends(whole: LoopWithEnds, made: LoopKernels | None = None) -> Kernel | Declined:
    """The kernel of a loop and its ends; see :func:`fuse.kernel.loops.lower_loops.lower_with_ends`."""
    pointers = _Pointers(whole)
    calls: list[tuple[Kernel, list[str]]] = []
    for node in whole.body.graph.nodes:
        if (module := whole.called(node)) is None:
            pointers.note(node)
            continue
        kernel = _kernel_of(module, node, made)
        if isinstance(kernel, Declined):
            return kernel
        calls.append((kernel, pointers.arguments(node, kernel)))
    return _joined(whole, pointers, calls)


def _kernel_of(module: object, call: Node, made: LoopKernels | None) -> Kernel | Declined:
    if isinstance(module, Loop):
        operands = [argument.meta["val"] for argument in call.args if isinstance(argument, Node)]
        return loop_kernel(module, operands, list(call.meta["val"]), made)
    assert isinstance(module, GraphModule)
    return end_kernel(module)


@dataclass
class _Pointers:
    """Pointers to the values of a loop with ends, as C++ expressions; the kernel's sizes, and its workspace in
    bytes."""

    whole: LoopWithEnds
    sizes: list[tuple[str, int]] = field(default_factory=list)
    workspace: int = 0
    bases: dict[Node, tuple[str, int]] = field(default_factory=dict)  # pointer, and the offset of its first element
    views: set[Node] = field(default_factory=set)

    def note(self, node: Node) -> None:
        """Record the pointer of a placeholder or a view; :meth:`arguments` records the results of calls."""
        if node.op == "placeholder":
            self.bases[node] = f"args[{len(self.bases)}]", int(node.meta["val"].storage_offset())
        elif node.op == "call_function" and node not in self.bases:
            self.bases[node] = self.bases[node.all_input_nodes[0]]
            self.views.add(node)

    def arguments(self, call: Node, kernel: Kernel) -> list[str]:
        """Arguments of a kernel: operands, results, workspace, sizes."""
        operands = [self._pointer(argument) for argument in call.args if isinstance(argument, Node)]
        given = [*operands, *self._results(call)]
        if kernel.workspace_bytes:
            given.append(self._taken(kernel.workspace_bytes))
        if kernel.sizes:
            given.append(f"(char *)(sizes + {len(self.sizes)})")
            self.sizes += kernel.sizes
        return given

    def _results(self, call: Node) -> list[str]:
        """A pointer for each result of a call: to the caller's memory, or into the workspace."""
        placeholders = len(self.whole.body.graph.find_nodes(op="placeholder"))
        returned = outputs_of(self.whole.body.graph)
        parts = {part.args[1]: part for part in call.users}
        found = []
        for number, value in enumerate(call.meta["val"]):
            part = parts.get(number)
            own = part in returned
            pointer = f"args[{placeholders + returned.index(part)}]" if own else self._taken(extent(value))
            if part is not None:
                self.bases[part] = pointer, int(value.storage_offset())
            found.append(pointer)
        return found

    def _taken(self, size: int) -> str:
        """A pointer to ``size`` new bytes of the workspace."""
        offset = self._size("place", self.workspace)
        self.workspace += aligned(size)
        return f"workspace + {offset}"

    def _pointer(self, node: Node) -> str:
        base, origin = self.bases[node]
        if node not in self.views:
            return base
        held = node.meta["val"]
        return f"{base} + {self._size('part', (held.storage_offset() - origin) * held.itemsize)}"

    def _size(self, name: str, value: int) -> str:
        self.sizes.append((name, value))
        return f"sizes[{len(self.sizes) - 1}]"


def _joined(whole: LoopWithEnds, pointers: _Pointers, calls: Sequence[tuple[Kernel, list[str]]]) -> Kernel:
    """One kernel that calls each of ``calls`` in turn."""
    results = outputs_of(whole.body.graph)
    position = len(whole.body.graph.find_nodes(op="placeholder")) + len(results)
    texts, lines = [], []
    if pointers.workspace:
        lines.append(f"    char *workspace = fuse_aligned(args[{position}]);")
        position += 1
    lines.append(f"    const int64_t *sizes = (const int64_t *)args[{position}];")
    for number, (kernel, arguments) in enumerate(calls):
        name = f"WHOLE_part_{number}"
        texts.append(kernel.source.replace(kernel.name, name).replace(_ENTRY.format(name), f"static int {name}("))
        lines.append(f"    char *const part_{number}[] = {{{', '.join(arguments)}}};")
        lines.append(f"    if ({name}(part_{number})) return 1;")
    entry = "\n".join([_ENTRY.format("WHOLE") + "char *const *args) {", *lines, "    return 0;", "}\n"])
    source = "\n".join([*texts, entry])
    (loop,) = (kernel for kernel, _ in calls if kernel.headers)
    stem = loop.name.rpartition("_")[0]
    name = f"{stem}_with_ends_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    workspace = pointers.workspace + ALIGNMENT if pointers.workspace else 0
    schedule = f"{loop.schedule}; one thread computes the operators before and after the loop"
    text, sizes = source.replace("WHOLE", name), tuple(pointers.sizes)
    return Kernel(name, text, frozenset(), loop.parallel, workspace, sizes, loop.headers, schedule)
