"""Count launches, arithmetic and memory traffic: of eager's dispatches (before) and of a graph (after).

    dispatches  ->  one launch for each operator that is not a view                          =  before
    graph       ->  one for each region, library call and ATen operator, loops unrolled,
                    one for each value copied back into an input                             =  after

Both are first turned into a stream of *calls*, so that the two counts, the count by user line and the list of unknown
operators cannot disagree. Everything here is predicted from shapes; ``fuse.cost.observe`` counts a real run by the same
table.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.cost import memory
from fuse.cost.profiles import DeviceProfile
from fuse.cost.work import Work, bytes_of, tensors_in, work_of_call, work_of_node
from fuse.graph.input_writes import launched, writes
from fuse.graph.loop import Loop
from fuse.graph.loop_with_ends import graph_in
from fuse.graph.outputs import outputs_of
from fuse.graph.signature import Dispatch, Signature


@dataclass(frozen=True)
class Count:
    """Predicted costs of one run.

    ``small_ops`` are launches predicted to run for less time than they take to launch; ``nodes`` are operators, views
    and those inside regions included, loop bodies once; ``bytes`` is traffic to and from memory; ``peak_bytes`` is the
    most memory live at once, inputs and parameters included. ``modelled_seconds`` come from the device profile: each
    launch takes the launch cost or, if longer, the time of its arithmetic or traffic. ``launching_seconds`` is the
    part of them in which the device waits for launches.
    """

    launches: int = 0
    by_kind: Mapping[ops.Kind, int] = field(default_factory=dict)
    small_ops: int = 0
    nodes: int = 0
    flops: int = 0
    bytes: int = 0
    peak_bytes: int = 0
    modelled_seconds: float = 0.0
    launching_seconds: float = 0.0

    def __add__(self, other: Count) -> Count:
        """Two runs, one after the other: everything adds up but the peak, which is the higher one.

        >>> (Count(launches=2, peak_bytes=8) + Count(launches=3, peak_bytes=4)).to_dict()["launches"]
        5
        """
        kinds = Counter(self.by_kind) + Counter(other.by_kind)
        return Count(
            launches=self.launches + other.launches,
            by_kind={kind: kinds[kind] for kind in ops.REPORTED_KINDS if kinds[kind]},
            small_ops=self.small_ops + other.small_ops,
            nodes=self.nodes + other.nodes,
            flops=self.flops + other.flops,
            bytes=self.bytes + other.bytes,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            modelled_seconds=self.modelled_seconds + other.modelled_seconds,
            launching_seconds=self.launching_seconds + other.launching_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain Python values, ready for JSON.

        >>> Count(launches=1, by_kind={"gemm": 1}).to_dict()["by_kind"]
        {'gemm': 1}
        """
        return {**dataclasses.asdict(self), "by_kind": dict(self.by_kind)}


@dataclass(frozen=True)
class CountedCall:
    """One entry of the stream: a call made ``repeats`` times, each time with ``launches`` kernels."""

    kind: ops.Kind
    launches: int
    work: Work
    source: str
    nodes: int = 1
    repeats: int = 1
    unknown: str | None = None


def count_dispatches(dispatches: Sequence[Dispatch], profile: DeviceProfile) -> Count:
    """Count what eager dispatched: all operators except views and those that run no kernel (``empty``, assertions).

    >>> from fuse.cost import profiles
    >>> x = torch.ones(4, 8)
    >>> record = [
    ...     Dispatch(torch.ops.aten.t.default, (x,), {}, x.t(), "model.py:3"),
    ...     Dispatch(torch.ops.aten.relu.default, (x.t(),), {}, x.t().relu(), "model.py:4"),
    ... ]
    >>> count_dispatches(record, profiles.get("cpu")).by_kind
    {'pointwise': 1}
    """
    return _total(calls_of_dispatches(dispatches), profile, memory.peak_of_dispatches(dispatches))


def count_graph(graph: GraphModule, profile: DeviceProfile) -> Count:
    """Count the launches of a run of a captured or rewritten graph.

    A region is one launch whose traffic is its inputs and outputs. A loop counts as its body, trip count times, or as
    one launch if its module says ``persistent``. Each mutation of the signature is one copy, or two if its value must
    be copied aside first; all small ones together are one copy.

    >>> from fuse.cost import profiles
    >>> from fuse.graph.capture import capture
    >>> graph = capture(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), (torch.ones(4, 8),))
    >>> count_graph(graph, profiles.get("cpu")).by_kind
    {'gemm': 1, 'pointwise': 1}
    """
    return _total(calls_of_graph(graph), profile, memory.peak_of_graph(graph))


def by_source(counted: GraphModule | Sequence[Dispatch]) -> dict[str, int]:
    """Launches of each user line, the largest first.

    >>> by_source([Dispatch(torch.ops.aten.relu.default, (torch.ones(2),), {}, torch.ones(2), "model.py:4")])
    {'model.py:4': 1}
    """
    launches: Counter[str] = Counter()
    for call in _calls(counted):
        launches[call.source] += call.launches * call.repeats
    return {source: count for source, count in launches.most_common() if count}


def unknown_ops(counted: GraphModule | Sequence[Dispatch]) -> list[str]:
    """Names of operators the table does not know, sorted; each call of one counts as one launch of kind ``other``.

    >>> unknown_ops([Dispatch(torch.ops.aten.relu.default, (torch.ones(2),), {}, torch.ones(2), "")])
    []
    """
    return sorted({call.unknown for call in _calls(counted) if call.unknown})


def calls_of_dispatches(dispatches: Sequence[Dispatch]) -> Iterator[CountedCall]:
    """The calls eager made, in order, views included (with no launches)."""
    for dispatch in dispatches:
        work = work_of_call(dispatch.op, dispatch.args, dispatch.kwargs, dispatch.result)
        yield _call_of_operator(dispatch.op, work, dispatch.source)


def calls_of_graph(graph: GraphModule) -> Iterator[CountedCall]:
    """The calls that running a graph makes, in order, nested graphs included."""
    for node in graph.graph.nodes:
        yield from calls_of_node(graph, node)
    for group in launched(writes(graph)):
        written, source = group[0].value.meta["val"], group[0].value.meta.get("source", "")
        copies = 2 if group[0].aside else 1
        moved = 2 * copies * sum(bytes_of(write.value.meta["val"]) for write in group)
        yield CountedCall("movement", copies, Work(0, moved, written.dtype), source, nodes=0)
    for node in _given_twice(graph):
        copied = node.meta["val"]
        work = Work(0, 2 * bytes_of(copied), copied.dtype)
        yield CountedCall("movement", 1, work, node.meta.get("source", ""), nodes=0)


def calls_of_node(graph: GraphModule, node: Node) -> Iterator[CountedCall]:
    """The calls that one node of ``graph`` makes; for a loop without a kernel, the calls of its body in each step."""
    if node.op == "call_module":
        yield from _calls_of_module(node, graph.get_submodule(str(node.target)))
    elif node.op == "call_method" or (node.op == "call_function" and not _reads_or_computes_numbers(node)):
        yield _call_of_node(node)


def _given_twice(graph: GraphModule) -> Iterator[Node]:
    """Results that are the same tensor as another result, or view a part of a tensor: the caller gets copies."""
    signature: Signature | None = graph.meta.get("signature")
    if signature is None:
        return
    results = outputs_of(graph.graph)
    taken: set[tuple[Node, Any]] = set()
    for index in sorted({spec.index for spec in signature.outputs if spec.kind == "graph"}):
        node, part = results[index], None
        whole = True
        while _is_look(node):
            base = node.all_input_nodes[0]
            if node.target is operator.getitem and not _is_look(base):
                part = node.args[1]
            elif isinstance(held := base.meta["val"], torch.Tensor):
                whole = whole and held.numel() == node.meta["val"].numel()
            node = base
        if (node, part) in taken or not whole:
            yield results[index]
        taken.add((node, part))


def _calls(counted: GraphModule | Sequence[Dispatch]) -> Iterator[CountedCall]:
    return calls_of_graph(counted) if isinstance(counted, GraphModule) else calls_of_dispatches(counted)


def _calls_of_module(node: Node, module: torch.nn.Module) -> Iterator[CountedCall]:
    kind = getattr(module, "meta", {}).get("kind")
    source = node.meta.get("source", "")
    inside = graph_in(module)
    if inside is None:
        yield CountedCall("other", 1, _traffic(node), source, unknown=type(module).__name__)
    elif isinstance(module, Loop) and module.persistent:
        read = sum(bytes_of(tensor) for tensor in _distinct_tensors(node))
        yield _fused("loop", node, source, read, list(calls_of_graph(inside)), module.trip_count)
    elif isinstance(module, Loop):
        body = calls_of_graph(inside)
        yield from (dataclasses.replace(call, repeats=call.repeats * module.trip_count) for call in body)
        if module.gathered:
            yield CountedCall("movement", module.gathered, _traffic(node), source, nodes=0)
    elif kind in ("region", "loop"):
        yield _fused(kind, node, source, _read_by(inside), list(calls_of_graph(inside)))
    else:
        yield from calls_of_graph(inside)


def _fused(
    kind: ops.Kind, node: Node, source: str, bytes_read: int, body: Sequence[CountedCall], repeats: int = 1
) -> CountedCall:
    """A nested graph that runs as one kernel: the arithmetic of its body, the traffic of its boundary."""
    results = list(tensors_in(node.meta["val"]))
    work = Work(
        flops=repeats * sum(call.work.flops * call.repeats for call in body),
        bytes=bytes_read + sum(map(bytes_of, results)),
        dtype=results[0].dtype if results else torch.float32,
    )
    return CountedCall(kind, 1, work, source, nodes=sum(call.nodes for call in body))


def _read_by(region: GraphModule) -> int:
    """Bytes a region reads; an input that it only slices counts with the slices."""
    used: dict[Node, int] = {}
    for node in reversed(region.graph.nodes):
        whole = sum(map(bytes_of, tensors_in(node.meta.get("val"))))
        through_looks = sum(used[user] for user in node.users) if all(map(_is_look, node.users)) else whole
        used[node] = min(whole, through_looks)
    return sum(count for node, count in used.items() if node.op == "placeholder")


def _is_look(node: Node) -> bool:
    return node.target is operator.getitem or ops.is_view(node.target)


def _call_of_node(node: Node) -> CountedCall:
    source = node.meta.get("source", "")
    if not isinstance(node.target, OpOverload):
        return CountedCall("other", 1, _traffic(node), source, unknown=_name(node.target))
    return _call_of_operator(node.target, work_of_node(node), source)


def _call_of_operator(op: OpOverload, work: Work, source: str) -> CountedCall:
    facts = ops.info(op)
    if facts is None:
        return CountedCall("other", 1, work, source, unknown=str(op))
    return CountedCall(facts.kind, facts.launches, work, source)


def _reads_or_computes_numbers(node: Node) -> bool:
    """Whether a node selects one of several results, or is arithmetic on sizes: neither is an operator."""
    module = getattr(node.target, "__module__", None)
    return not isinstance(node.target, OpOverload) and module in (operator.__name__, "_operator", math.__name__)


def _traffic(node: Node) -> Work:
    """The least traffic of a call of an unknown operator."""
    results = list(tensors_in(node.meta.get("val")))
    moved = [*_distinct_tensors(node), *results]
    return Work(0, sum(map(bytes_of, moved)), results[0].dtype if results else torch.float32)


def _distinct_tensors(node: Node) -> list[torch.Tensor]:
    return [tensor for argument in node.all_input_nodes for tensor in tensors_in(argument.meta.get("val"))]


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _total(calls: Iterator[CountedCall], profile: DeviceProfile, peak_bytes: int) -> Count:
    by_kind: Counter[ops.Kind] = Counter()
    small_ops = nodes = flops = bytes_moved = 0
    modelled = launching = 0.0
    for call in calls:
        launches = call.launches * call.repeats
        by_kind[call.kind] += launches
        nodes += call.nodes
        flops += call.work.flops * call.repeats
        bytes_moved += call.work.bytes * call.repeats
        if launches and profile.is_small(call.work.flops, call.work.bytes, call.work.dtype):
            small_ops += launches
        if launches:
            computing = profile.seconds(call.work.flops, call.work.bytes, call.work.dtype)
            waiting = max(0.0, call.launches * profile.launch_seconds - computing)
            modelled += call.repeats * (computing + waiting)
            launching += call.repeats * waiting
    return Count(
        launches=by_kind.total(),
        by_kind={kind: by_kind[kind] for kind in ops.REPORTED_KINDS if by_kind[kind]},
        small_ops=small_ops,
        nodes=nodes,
        flops=flops,
        bytes=bytes_moved,
        peak_bytes=peak_bytes,
        modelled_seconds=modelled,
        launching_seconds=launching,
    )
