"""Translate a graph with regions to steps over buffers.

    %r = call_module[region](%x, %w)          kernel   reads x, w   writes buffer 2
    %h = getitem(%r, 0)                       -        another name for buffer 2
    %s = aten.slice(%h, 1, 0, 4)              -        a place in buffer 2
    %y = aten.mm(%s, %w)                ->    product  reads buffer 2, w   writes buffer 3
    %z = aten.sort(%y)                        call     torch.ops.aten.sort(...)

Views and ``getitem`` are layout arithmetic. Matrix products go to BLAS. Single operators that can be lowered become
kernels of one operator. All other operators are called from Python. Values that the caller receives get memory of their
own. Writes to inputs come last, so that every step reads the inputs as they were when the call began.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from fuse import ops
from fuse.cost.inside import inside_bytes
from fuse.devices import device_of
from fuse.errors import FuseError
from fuse.graph.fakes.fake_operators import fake_like, out_of_inference
from fuse.graph.input_writes import Write, launched, writes
from fuse.graph.loop import Loop
from fuse.graph.loop_with_ends import LoopWithEnds, graph_in
from fuse.graph.numbers.learned import Learning
from fuse.graph.outputs import finished, outputs_of
from fuse.graph.signature import Signature
from fuse.graph.strides import extent
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.loops.lower_loops import lower_loop, lower_with_ends
from fuse.kernel.target import LoopKernels
from fuse.runtime.programs.assembly import ASSEMBLE, piece_offsets, placed_pieces
from fuse.runtime.programs.device import Runtime, runtime_of
from fuse.runtime.programs.layout import is_lazy, origin_bytes, part, same_layout
from fuse.runtime.programs.reference import launches_of
from fuse.runtime.programs.single_operators import kernel_key, region_of, results_read
from fuse.runtime.programs.steps import (
    Allocation,
    BufferView,
    CallStep,
    CopyStep,
    Fallback,
    KernelStep,
    LoopStep,
    Place,
    ProductStep,
    ProgramResult,
    PythonStep,
    Ref,
    Schedule,
    Step,
)


def schedule(graph: GraphModule) -> Schedule:
    """The steps of a captured (and rewritten) graph on its device."""
    with out_of_inference():
        return _Scheduler(graph).run()


class _Scheduler:
    """State while nodes are translated in order; ``outer`` translates the graph around, if this is a loop's body."""

    def __init__(self, graph: GraphModule, outer: _Scheduler | None = None) -> None:
        self.graph = graph
        self.runtime: Runtime = outer.runtime if outer else runtime_of(device_of(graph))
        self.signature: Signature | None = graph.meta.get("signature")
        self.buffers: list[Allocation] = []
        self.views: list[BufferView] = []
        self.steps: list[Step] = []
        self.fallbacks: list[Fallback] = []
        self.regions = 0
        # node -> (buffer, bytes to add to the storage offset of the node's val); one for each of several results
        self.anchors: dict[Node, tuple[int, int]] = {}
        self.parts: dict[Node, list[tuple[int, int] | None]] = {}
        self.refs: dict[Node, Ref] = {}  # nodes that exist as Python tensors
        self.single_kernels: dict[object, Kernel | Declined] = outer.single_kernels if outer else {}
        self.loops: LoopKernels = outer.loops if outer else {}
        self.assembled: dict[Node, int] = {}
        self.handed_on = set(outputs_of(graph.graph))
        self.waiting = placed_pieces(graph)  # piece -> (assemble node, offset in elements)

    def run(self) -> Schedule:
        confirmed = None
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self.anchors[node] = self._buffer("input", node.meta["val"])
            elif node.op == "call_module":
                self._module(node)
            elif node.op == "call_function":
                self._function(node)
            elif node.op == "output":
                results = self._results(node) if self.signature else self._states(node)
                if self.signature and self.signature.learning:
                    confirmed = self._known_after(results, self.signature.learning)
                self._mutations()
        return Schedule(
            tuple(self.buffers),
            tuple(self.views),
            tuple(self.steps),
            results,
            tuple(self.fallbacks),
            self.regions,
            self.runtime,
            confirmed,
        )

    def _known_after(self, results: Sequence[ProgramResult | None], learning: Learning) -> int:
        """Number of steps after which all values that Python read are computed; all steps so far if some are calls."""
        if any(isinstance(step, PythonStep) for step in self.steps):
            return len(self.steps)
        values = [results[one.leaf] for one in learning.learned]
        read = {value.buffer for value in values if value is not None}
        writes = ((number, getattr(step, "writes", ())) for number, step in enumerate(self.steps, start=1))
        return max((number for number, buffers in writes if any(one.buffer in read for one in buffers)), default=0)

    # ---- places ----------------------------------------------------------------------------------------------------

    def _buffer(self, origin: Any, value: Tensor) -> tuple[int, int]:
        """The anchor of a node that is the whole of a new buffer for ``value``."""
        self.buffers.append(Allocation(origin, value, extent(value)))
        return len(self.buffers) - 1, -origin_bytes(value)

    def _place(self, node: Node) -> Place:
        buffer, shift = self.anchors[node]
        return Place(buffer, shift + origin_bytes(node.meta["val"]))

    def _claim(self, node: Node) -> tuple[int, int]:
        """The anchor of a kernel's result: its place in the assembled tensor, if it is a piece of one, or a new
        buffer."""
        if node not in self.waiting:
            return self._buffer("made", node.meta["val"])
        whole, offset = self.waiting[node]
        if whole not in self.assembled:
            self.assembled[whole], _ = self._buffer("made", whole.meta["val"])
        return self.assembled[whole], offset * node.meta["val"].itemsize - origin_bytes(node.meta["val"])

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def _module(self, node: Node) -> None:
        region = self.graph.get_submodule(str(node.target))
        if isinstance(region, Loop) and not region.persistent:
            self._loop(node, region)
            return
        inputs = [argument for argument in node.args if isinstance(argument, Node)]
        getters: dict[int, Node] = {}
        for user in node.users:
            getters.setdefault(user.args[1], user)  # type: ignore[arg-type]  # FX types arguments loosely
        placed = [getters[i] for i in getters if getters[i] in self.waiting]
        made = self._fitted(region, node, inputs, getters)
        if not isinstance(made, Kernel):
            for piece in placed:
                del self.waiting[piece]
        if isinstance(made, Declined):
            self.fallbacks.append(Fallback(str(node.target), _source(node, region), made.reason))
            self._call(node, region, launches_of(region))
            return
        values = node.meta["val"]
        anchors = [
            self._claim(getters[i]) if i in getters else self._buffer("made", values[i]) for i in range(len(values))
        ]
        self.parts[node] = list(anchors)
        self.regions += 1
        kind: ops.Kind = "loop" if isinstance(region, (Loop, LoopWithEnds)) else "region"
        self._kernel(made, inputs, anchors, list(values), kind, _source(node, region))

    def _fitted(
        self, region: torch.nn.Module, node: Node, inputs: Sequence[Node], getters: dict[int, Node]
    ) -> Kernel | Declined:
        """The kernel of a region or loop for the layouts of its inputs and results, or the reason why there is none."""
        if isinstance(region, Loop):
            return lower_loop(region, [n.meta["val"] for n in inputs], list(node.meta["val"]), self.loops)
        body = graph_in(region)
        if body is None or getattr(region, "meta", {}).get("kind") not in ("region", "loop"):
            return Declined("there is no kernel for this kind of module yet")
        body_inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        for outer, inner in zip(inputs, body_inputs, strict=True):
            if not same_layout(outer.meta["val"], inner.meta["val"]):
                return Declined(f"input {outer.name} has another layout than the region was made for")
        if isinstance(region, LoopWithEnds):
            return lower_with_ends(region, self.loops)
        results = outputs_of(body.graph)
        values = list(node.meta["val"])
        for i, getter in getters.items():
            if getter in self.waiting:
                whole, _ = self.waiting[getter]
                fitted = fake_like(getter.meta["val"], whole.meta["val"].stride())
                getter.meta["val"] = values[i] = results[i].meta["val"] = fitted
        node.meta["val"] = tuple(values)
        return self.runtime.lower(body)

    def _function(self, node: Node) -> None:
        if node.target is operator.getitem:
            parent, index = node.args
            if parent in self.parts:
                anchor = self.parts[parent][index]  # type: ignore[index]  # FX types arguments loosely
                if anchor is not None:
                    self.anchors[node] = anchor
        elif node.target is ASSEMBLE:
            self._assemble(node)
        elif ops.is_view(node.target):
            self._view(node)
        elif not node.users:  # a check, which may raise
            self._call(node, node.target, _launches(node))  # type: ignore[arg-type]  # FX types targets loosely
        elif isinstance(preferred := self.runtime.prefer(node, self._single_kernel), Kernel):
            self._single_operator(node, preferred)
        elif (found := self.runtime.product(node)) is not None:
            operands = (found.left, found.right, *([found.bias] if found.bias else []))
            self.anchors[node] = self._buffer("made", node.meta["val"])
            places = tuple(map(self._place, operands))
            self.steps.append(ProductStep(found, places, (self._place(node),), node.meta.get("source", "")))
        elif not preferred and isinstance(kernel := self._single_kernel(node), Kernel):
            self._single_operator(node, kernel)
        else:
            self._call(node, node.target, _launches(node))  # type: ignore[arg-type]  # FX types targets loosely

    def _view(self, node: Node) -> None:
        base = node.all_input_nodes[0]
        if not _shares(node.meta["val"], base.meta["val"]):
            # A pass changed the base, but not the metadata of the view: compute it again.
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]  # FX types targets loosely
        buffer, shift = self.anchors[base]
        if isinstance(node.meta["val"], Tensor):
            self.anchors[node] = buffer, shift
        else:
            self.parts[node] = [(buffer, shift)] * len(node.meta["val"])

    def _assemble(self, node: Node) -> None:
        """Add copies of the pieces that no kernel writes in place."""
        value: Tensor = node.meta["val"]
        if node not in self.assembled:
            self.assembled[node], _ = self._buffer("made", value)
        self.anchors[node] = self.assembled[node], -origin_bytes(value)
        for piece, offset in piece_offsets(node):
            if self.waiting.get(piece) != (node, offset):
                self._copy(piece, Place(self.assembled[node], offset * value.itemsize), value.stride())

    def _single_operator(self, node: Node, kernel: Kernel) -> None:
        values = results_read(node)
        anchors = {index: self._buffer("made", value) for index, value in values.items()}
        if isinstance(node.meta["val"], Tensor):
            self.anchors[node] = anchors[0]
        else:
            self.parts[node] = [anchors.get(index) for index in range(len(node.meta["val"]))]
        kind, source = ops.kind(node.target), node.meta.get("source", "")
        self._kernel(kernel, node.all_input_nodes, list(anchors.values()), list(values.values()), kind, source)

    def _single_kernel(self, node: Node) -> Kernel | Declined:
        if not isinstance(node.meta["val"], Tensor):
            if any(user.target is not operator.getitem for user in node.users):
                return Declined("the results of the operator are read as one tuple")
            if not self.signature and self.handed_on.intersection(node.users):
                return Declined("a loop gathers the results of the operator")  # counted so: ``Loop.gathered``
        key = kernel_key(node)
        if key not in self.single_kernels:
            self.single_kernels[key] = self.runtime.lower(region_of(node)[0])
        return self.single_kernels[key]

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _kernel(
        self,
        kernel: Kernel,
        inputs: Sequence[Node],
        anchors: Sequence[tuple[int, int]],
        values: Sequence[Tensor],
        kind: ops.Kind,
        source: str,
    ) -> None:
        if kernel.workspace_bytes:
            scratch = torch.empty(kernel.workspace_bytes, dtype=torch.uint8, device="meta")
            anchors, values = [*anchors, self._buffer("made", scratch)], [*values, scratch]
        shareable = tuple((i, o) for i, o in sorted(kernel.in_place) if same_layout(inputs[i].meta["val"], values[o]))
        writes = tuple(Place(b, shift + origin_bytes(v)) for (b, shift), v in zip(anchors, values, strict=True))
        reads = tuple(map(self._place, inputs))
        self.steps.append(KernelStep(kernel, reads, writes, shareable, kind, source))

    def _copy(self, source: Node, target: Place, stride: Sequence[int]) -> None:
        value: Tensor = source.meta["val"]
        if is_lazy(value):
            raise FuseError(
                f"{source.name} at {source.meta.get('source') or '?'} is a lazily conjugated or negated result"
            )
        self.steps.append(
            CopyStep(
                (self._place(source),),
                (target,),
                value.itemsize,
                tuple(value.shape),
                value.stride(),
                tuple(stride),
                source.meta.get("source", ""),
            )
        )

    def _call(self, node: Node, function: Callable[..., Any], launches: int) -> None:
        args, kwargs = self._with_refs(node)
        results = self._called(node)
        kept, values = {position for position, _ in results}, node.meta["val"]
        several = enumerate(values) if isinstance(values, (tuple, list)) else ()
        passing = sum(extent(value) for i, value in several if isinstance(value, Tensor) and i not in kept)
        passing += inside_bytes(function, map_arg(node.args, lambda n: n.meta["val"]), values)
        self.steps.append(CallStep(function, args, kwargs, results, launches, node.meta.get("source", ""), passing))

    def _called(self, node: Node) -> tuple[tuple[int | None, Ref], ...]:
        """The buffers of a Python call's results: (position in the returned tuple, reference)."""
        value = node.meta["val"]
        if isinstance(value, Tensor):
            self.anchors[node] = self._buffer("called", value)
            return ((None, Ref(self.anchors[node][0])),)
        if value is None:  # a check
            return ()
        read = {part.args[1] for part in node.users if part.users}  # an operator may omit results that nobody reads
        made = [self._buffer("called", v) if isinstance(v, Tensor) and i in read else None for i, v in enumerate(value)]
        self.parts[node] = list(made)
        return tuple((i, Ref(anchor[0])) for i, anchor in enumerate(made) if anchor is not None)

    def _loop(self, node: Node, loop: Loop) -> None:
        """Add a step that runs the program of a loop's body."""
        inner = _Scheduler(loop.body, self)
        body = inner.run()
        self.fallbacks += body.fallbacks
        self.regions += body.regions
        args, kwargs = self._with_refs(node)
        layouts = tuple((tuple(v.shape), v.stride(), v.dtype) for v in node.meta["val"])
        results = self._called(node)
        self.steps.append(LoopStep(body, loop.spec, args, results, layouts, kwargs, loop.spec.source))

    def _ref(self, node: Node) -> Ref:
        """The reference of a node for Python calls; adds a step that makes a view when one is first needed."""
        if node in self.refs:
            return self.refs[node]
        place, value = self._place(node), node.meta["val"]
        buffer = self.buffers[place.buffer]
        if place.offset == 0 and same_layout(value, buffer.value):
            self.refs[node] = Ref(place.buffer)
            return self.refs[node]
        function: Callable[..., Any]
        kwargs: dict[str, Any] = {}
        if value.dtype == buffer.value.dtype and not is_lazy(value) and not is_lazy(buffer.value):
            function = part
            args = (Ref(place.buffer), tuple(value.shape), value.stride(), place.offset // value.itemsize)
        elif node.op == "call_function" and node.target is not operator.getitem and node.target is not ASSEMBLE:
            args, kwargs = self._with_refs(node)
            function = node.target  # type: ignore[assignment]  # FX types targets loosely
        else:
            parent: Node = node.args[0]  # type: ignore[assignment]  # of several views that an operator returns
            args, kwargs = self._with_refs(parent)
            function = _Nth(parent.target, node.args[1])  # type: ignore[arg-type]  # FX types targets loosely
        self.views.append(BufferView(place.buffer, value))
        self.refs[node] = Ref(len(self.views) - 1, view=True)
        self.steps.append(CallStep(function, args, kwargs, ((None, self.refs[node]),), 0))
        return self.refs[node]

    def _with_refs(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a node with nodes replaced by references."""
        return map_arg((node.args, dict(node.kwargs)), self._ref)  # type: ignore[arg-type]  # FX types arguments loosely

    # ---- what the caller sees --------------------------------------------------------------------------------------

    def _results(self, output: Node) -> tuple[ProgramResult | None, ...]:
        """The results of the program, each in its own buffer; the signature says which results share memory in
        eager."""
        values: tuple[Node, ...] = output.args[0]  # type: ignore[assignment]  # FX types arguments loosely
        assert self.signature is not None
        named = {spec.index for spec in self.signature.outputs if spec.kind == "graph"}
        taken: set[int] = set()
        results: list[ProgramResult | None] = []
        for index, node in enumerate(values):
            if index not in named:
                results.append(None)
                continue
            number, value = self._place(node).buffer, node.meta["val"]
            if number in taken or not (self._is_whole(node) or self._fills_called(node)):
                number, _ = self._buffer("made", value)
                self._copy(node, Place(number, 0), value.stride())
            taken.add(number)
            results.append(ProgramResult(number, value))
        return tuple(results)

    def _states(self, output: Node) -> tuple[ProgramResult, ...]:
        """The results of a loop step: inputs and whole buffers as they are, other values copied to new buffers."""
        values: tuple[Node, ...] = output.args[0]  # type: ignore[assignment]  # FX types arguments loosely
        results: list[ProgramResult] = []
        layouts: dict[int, Tensor] = {}
        for node in values:
            number, value = self._place(node).buffer, node.meta["val"]
            whole = node.op == "placeholder" or self._is_whole(node)
            if not whole or not same_layout(layouts.setdefault(number, value), value):
                number, _ = self._buffer("made", value)
                self._copy(node, Place(number, 0), value.stride())
            results.append(ProgramResult(number, value))
        return tuple(results)

    def _is_whole(self, node: Node) -> bool:
        """Whether the node's value is a whole buffer that the caller may receive."""
        place, value = self._place(node), node.meta["val"]
        buffer = self.buffers[place.buffer]
        if place.offset != 0 or buffer.origin == "input" or is_lazy(value):
            return False
        return same_layout(value, buffer.value) or (buffer.origin == "made" and extent(value) == buffer.size)

    def _fills_called(self, node: Node) -> bool:
        """Whether the node's value is the whole result of a Python call in another layout."""
        place, value = self._place(node), node.meta["val"]
        buffer = self.buffers[place.buffer]
        plain = place.offset == 0 and value.dtype == buffer.value.dtype and not is_lazy(value)
        return buffer.origin == "called" and plain and not is_lazy(buffer.value) and extent(value) == buffer.size

    def _mutations(self) -> None:
        """Add steps that write values back into inputs; values that another write would overwrite are copied first."""
        planned = writes(self.graph)
        sources = {}
        for write in planned:
            node, value = write.value, write.value.meta["val"]
            if is_lazy(value) or is_lazy(self.buffers[write.input_index].value):
                raise FuseError(f"{node.name}, lazily conjugated or negated, is written to an input")
            sources[write] = self._place(node), value.stride()
            if write.aside:
                aside, _ = self._buffer("made", fake_like(value))
                sources[write] = Place(aside, 0), self.buffers[aside].value.stride()
                self._copy(node, *sources[write])
        for group in launched(planned):
            if len(group) > 1 and isinstance(made := self.runtime.lower(self._copies(group)), Kernel):
                reads = tuple(sources[write][0] for write in group)
                written, line = tuple(Place(w.input_index, 0) for w in group), group[0].value.meta.get("source", "")
                self.steps.append(KernelStep(made, reads, written, (), "movement", line))
                continue
            for write in group:
                target = self.buffers[write.input_index].value
                (source, stride), place = sources[write], Place(write.input_index, 0)
                line, size = write.value.meta.get("source", ""), tuple(target.shape)
                self.steps.append(CopyStep((source,), (place,), target.itemsize, size, stride, target.stride(), line))

    def _copies(self, group: Sequence[Write]) -> GraphModule:
        """A region that copies values to the layouts of the inputs that are written."""
        body = Graph()
        given = [body.placeholder(write.value.name) for write in group]
        results = []
        for write, node in zip(group, given, strict=True):
            node.meta = {"val": write.value.meta["val"], "source": ""}
            results.append(body.call_function(torch.ops.aten.clone.default, (node,)))
            results[-1].meta = {"val": self.buffers[write.input_index].value, "source": write.value.meta["source"]}
        return finished(body, results)


@dataclass(frozen=True)
class _Nth:
    """One tensor of a view operator that returns several (``split``, ``unbind``)."""

    function: Callable[..., Any]
    index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.function(*args, **kwargs)[self.index]
        return result


def _source(node: Node, region: torch.nn.Module) -> str:
    if node.meta.get("source") or not isinstance(region, GraphModule):
        return str(node.meta.get("source", ""))
    return next((n.meta["source"] for n in region.graph.nodes if n.meta.get("source")), "")


def _shares(value: Any, base: Tensor) -> bool:
    first = value if isinstance(value, Tensor) else value[0] if value else base
    return bool(first.untyped_storage()._cdata == base.untyped_storage()._cdata)


def _launches(node: Node) -> int:
    facts = ops.info(node.target)
    return facts.launches if facts else 1
