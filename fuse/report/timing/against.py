"""Run a model under ``torch.compile``: launches by line, operators of kernels, unfused pairs with reasons.

    model  -> Dynamo    ->  graphs, and graph breaks with their reasons
           -> Inductor  ->  wrappers, whose calls are counted; its code generator tells what each kernel computes
                        ->  refusals: its scheduler's reasons not to fuse a pair of nodes

Dynamo and Inductor are imported only for such a report, and their logs stay off the terminal.
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from fuse.graph.sources import line_at, line_traced
from fuse.report.report import Break, CompiledKernel, Refusal, TorchCompiled
from fuse.report.timing.inductor import calls_in, generated_code

_NEVER_TRIED = "one of the two is a library or ATen call, and Inductor does not try to fuse those"
Computed = tuple[tuple[str, ...], tuple[str, ...]]
"""The user's lines and the ATen operators that a kernel computes."""


def compiled(model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> TorchCompiled:
    """Run ``torch.compile`` on copies of a model and its arguments, without gradients, and report the result.

    Code is generated anew, without its caches. Launches of operators that it leaves to eager are not counted;
    ``breaks`` names where this happens.
    """
    from torch._dynamo.utils import graph_break_reasons
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.utils import fresh_cache

    graphs: list[dict[str, str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append({node.name: line_traced(node.meta.get("stack_trace") or "") for node in graph.graph.nodes})
        return compile_fx(graph, inputs)

    own, own_args, own_kwargs = copy.deepcopy((model, args, dict(kwargs or {})))
    torch._dynamo.reset()
    known = len(graph_break_reasons)
    obstacle = ""
    started = time.perf_counter()
    with ExitStack() as around:
        around.enter_context(_silent())
        around.enter_context(fresh_cache())
        around.enter_context(torch._inductor.config.patch(force_disable_caches=True))
        wrappers = around.enter_context(generated_code())
        records = around.enter_context(_listening())
        around.enter_context(torch.no_grad())
        try:
            torch.compile(own, backend=backend)(*own_args, **own_kwargs)
        except Exception as error:  # any failure of the other compiler goes into the report
            obstacle = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    seconds = time.perf_counter() - started
    breaks = tuple(_break_of(reason) for reason in graph_break_reasons[known:])
    torch._dynamo.reset()
    kernels = tuple(_kernels(wrappers, graphs, records.written))
    lines: Counter[str] = Counter()
    for kernel in kernels:
        lines[kernel.lines[0] if kernel.lines else ""] += kernel.launches
    launches = sum(kernel.launches for kernel in kernels)
    refusals = tuple(_grouped(records))
    return TorchCompiled(launches, len(wrappers), breaks, kernels, refusals, seconds, dict(lines), obstacle)


def _kernels(
    wrappers: Sequence[str], graphs: Sequence[Mapping[str, str]], written: Sequence[tuple[str, Computed]]
) -> Iterator[CompiledKernel]:
    """The kernels that the wrappers call, with user lines; ``written`` has generated ones in call order."""
    waiting: dict[str, list[Computed]] = defaultdict(list)
    for name, computed in reversed(written):
        waiting[name].append(computed)
    for number, wrapper in enumerate(wrappers):
        known = graphs[number] if number < len(graphs) else {}
        for call in calls_in(wrapper):
            name = call.name.removesuffix(".run")
            if call.is_generated:
                lines, operators = waiting[name].pop() if waiting.get(name) else ((), ())
            else:
                lines = (line,) if (line := known.get(call.node, "")) else ()
                operators = (call.operator,) if call.operator else ()
            yield CompiledKernel(name, call.launches, lines, operators)


def _break_of(reason: Any) -> Break:
    """A graph break of Dynamo's: its reason in one line, and the innermost line of the user's stack."""
    said = next((line.strip() for line in str(reason.reason).splitlines() if line.strip()), "unknown reason")
    if said.startswith("generic_jump"):  # Dynamo's word for a branch
        said = f"Python branches on a value of the graph ({said})"
    stack = list(reason.user_stack or ())
    return Break(said, str(line_at(stack[-1].filename, stack[-1].lineno or 0)) if stack else "")


@dataclass
class _InductorRecords:
    """Records from Inductor while it compiles.

    ``pairs``: a reason and the names of two scheduler nodes not fused for it; ``group``: the final fused group of each
    node; ``written``: the name of each kernel, and the lines and operators that it computes.
    """

    pairs: dict[tuple[str, str, str], tuple[str, ...]] = field(default_factory=dict)
    group: dict[str, int] = field(default_factory=dict)
    written: list[tuple[str, Computed]] = field(default_factory=list)
    graphs: int = 0

    def name_of(self, node: Any) -> str:
        """A name for a scheduler node (a fused one: its first node's) that is unique among all graphs."""
        inside = node.get_nodes()
        return f"{self.graphs}.{(inside[0] if inside else node).get_name()}"

    def refuse(self, reason: str, one: Any, other: Any) -> None:
        """Note that two nodes were not fused."""
        lines = dict.fromkeys(line for node in (one, other) for line in _computed([node])[0])
        self.pairs.setdefault((reason, self.name_of(one), self.name_of(other)), tuple(lines))


@contextmanager
def _listening() -> Iterator[_InductorRecords]:
    """Record Inductor's scheduler and C++ generator within this context."""
    from torch._inductor import scheduler
    from torch._inductor.codegen.cpp import CppScheduling

    records = _InductorRecords()
    fuse_nodes, define_kernel = scheduler.Scheduler.fuse_nodes, CppScheduling.define_kernel

    class Noted(scheduler.WhyNoFuse):
        def __init__(self, node1: Any, node2: Any) -> None:
            super().__init__(node1, node2)
            self.pair = (node1, node2)

        def __call__(self, reason: str, *args: Any) -> None:
            super().__call__(reason, *args)
            records.refuse(_plain(reason), *self.pair)

    def grouped(self: Any, nodes: Any, *args: Any, **kwargs: Any) -> Any:
        records.graphs += 1
        made = fuse_nodes(self, nodes, *args, **kwargs)
        owners = {one.get_name(): node for node in made for one in node.get_nodes()}
        for number, node in enumerate(made):
            records.group |= {records.name_of(one): number for one in node.get_nodes()}
            for dependency in node.unmet_dependencies:
                buffer = self.name_to_buf.get(dependency.name)
                producer = owners.get(buffer.defining_op_name()) if buffer is not None else None
                if producer is not None and producer is not node and _is_library(self, producer, node):
                    records.refuse(_NEVER_TRIED, producer, node)
        return made

    def defined(self: Any, source: str, nodes: Any, *args: Any, **kwargs: Any) -> Any:
        name = define_kernel(self, source, nodes, *args, **kwargs)  # type: ignore[no-untyped-call]  # untyped in torch
        records.written.append((name, _computed(nodes)))
        return name

    with (
        mock.patch.object(scheduler, "WhyNoFuse", Noted),
        mock.patch.object(scheduler.Scheduler, "fuse_nodes", grouped),
        mock.patch.object(CppScheduling, "define_kernel", defined),
    ):
        yield records


def _is_library(scheduler: Any, *nodes: Any) -> bool:
    """Whether Inductor does not try to fuse one of the nodes."""
    return any(scheduler.unfusable_node(node) for node in nodes)


def _plain(reason: str) -> str:
    """A reason without its placeholders for sizes and names, so that equal causes have equal reasons.

    >>> _plain("numel/rnumel mismatch (%s, %s)")
    'numel/rnumel mismatch'
    """
    return reason.partition("%")[0].rstrip(" (:,=")


def _computed(nodes: Any) -> Computed:
    """The user's lines and the ATen operators that scheduler nodes compute."""
    lines: dict[str, None] = {}
    operators: dict[str, None] = {}
    for node in nodes:
        for inside in node.get_nodes():
            for origin in getattr(inside.node, "origins", None) or ():
                if line := line_traced(origin.meta.get("stack_trace") or ""):
                    lines[line] = None
                if origin.meta.get("original_aten") is not None:
                    operators[str(getattr(origin.meta["original_aten"], "_overloadpacket", origin.target))] = None
    return tuple(lines), tuple(operators)


def _grouped(records: _InductorRecords) -> Iterator[Refusal]:
    """Refusals by reason, the most frequent first, without pairs that were fused after all."""
    by_reason: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for (reason, one, other), lines in records.pairs.items():
        if one not in records.group or records.group[one] != records.group.get(other):
            by_reason[reason].append(lines)
    for reason, pairs in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        yield Refusal(reason, len(pairs), next((lines for lines in pairs if lines), ()))


@contextmanager
def _silent() -> Iterator[None]:
    """Silence the logs and warnings of other compilers."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
