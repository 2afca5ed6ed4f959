"""Lower a region to a kernel, or say why it has none.

    region (ATen operators)  ->  values  ->  loops  ->  source, by the target of its device

``lower`` returns a :class:`fuse.kernel.kernel.Kernel`, or ``Declined`` with the reason. Regions that differ only in the
names of their nodes share one kernel, so that the 64 steps of an unrolled loop are lowered once. Regions that read
parameters with other names get kernels with these names; only one of those is compiled (``Kernel.computes``).
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import struct
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from fuse import ops
from fuse.errors import FaultWarning, reason_of_fault
from fuse.graph.outputs import outputs_of
from fuse.kernel.arithmetic.extents import Conditions, NeedsNumber
from fuse.kernel.arithmetic.index import NotAffine, SplitNeeded
from fuse.kernel.config import DEFAULT, Config
from fuse.kernel.independent_sizes import independent_sizes
from fuse.kernel.kernel import Declined, Kernel, Served
from fuse.kernel.names import plain_name
from fuse.kernel.recipes.reading import computation_of, values_of
from fuse.kernel.recipes.registry import Unsupported, find_recipe
from fuse.kernel.sizes.members import FEWEST, ArgumentPlace, Members, alike_parts
from fuse.kernel.sizes.region_text import NodeNumber, Numbers, layouts, text_and_numbers, with_numbers
from fuse.kernel.sizes.sized import Lower, SizeFamily, Text, call_at_hand, sizes_vary
from fuse.kernel.target import TARGETS, Target, target_of
from fuse.kernel.traversals import children, within_stage
from fuse.kernel.values import Computation, Concat, Gather, Map, Pad, Reduce, Value

Made = TypeVar("Made")

MAX_RECURSION = 50_000
"""Frames while a region is lowered: those of a chain of 15,000 operators, at 3.2 frames for each."""
MAX_NAME_PARTS = 4
"""Operators that the name of a kernel is made of."""
BEFORE_ARGUMENTS = -1
"""Number of the argument that points to the sizes, in a kernel whose number of arguments varies."""


def can_lower(node: Node) -> bool:
    """Whether the operator of ``node`` has a recipe; ``lower`` may still decline its dtype, layout or arguments."""
    return node.op == "call_function" and (node.target is operator.getitem or find_recipe(node.target) is not None)


_KERNELS: dict[str, Kernel | Declined] = {}


def lower(region: GraphModule, config: Config = DEFAULT) -> Kernel | Declined:
    """The kernel of ``region``, or the reason why there is none.

    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> graph = make_fx(lambda x: (torch.tanh(x) + 1,), tracing_mode="fake")(torch.randn(4, 8))
    >>> kernel = lower(graph)
    >>> kernel.name.rsplit("_", 1)[0], kernel.in_place
    ('tanh_add', frozenset({(0, 0)}))
    """
    if config == DEFAULT and (parts := alike_parts(region)):
        found = _lower_or_decline(*parts, config) if parts[1].count >= FEWEST else _for_any_number(*parts)
        if isinstance(found, Kernel):
            return found
    return _lower_or_decline(region, None, config)


def _for_any_number(region: GraphModule, members: Members) -> Kernel | None:
    """The kernel of few members that also serves other numbers of them; None if their number is not known to vary."""
    call = call_at_hand()
    numbered = call is not None and (call.sizes is None or members.count in call.sizes)
    return _for_sizes(region, members) if numbered else None


def _lower_or_decline(region: GraphModule, members: Members | None, config: Config) -> Kernel | Declined:
    """The kernel of ``region``, or of ``members`` of which each computes it; or the reason why there is none."""
    key = f"{structure(region)}\n{members}\n{config}"
    known = _KERNELS.get(key)
    if known is None or (isinstance(known, Declined) and sizes_vary()):  # a kernel for varying sizes may exist
        known = (_for_sizes(region, members) if config == DEFAULT else None) or known
    if known is None:
        computes = hashlib.sha256(f"{structure(region, named=False)}\n{members}\n{config}".encode()).hexdigest()
        known = _KERNELS[key] = attempt(lambda: replace(_lower(region, members, key, config), computes=computes))
    return known


_TEXTS: dict[str, Text[Kernel]] = {}


def _for_sizes(region: GraphModule, members: Members | None) -> Kernel | None:
    """A kernel of ``region`` that serves other sizes too; None if no size varies or there is no such kernel."""
    if (call := call_at_hand()) is None:
        return None
    places = _places(members)
    spelling, numbers = _text(region, places)

    def lower(values: Numbers, conditions: Conditions) -> Kernel | None:
        sized, at = with_numbers(region, values, places, reals=True)
        return lower_for_sizes(
            sized, conditions, at and Members(at[0], tuple(ArgumentPlace(*place) for place in at[1]))
        )

    apart = call.sizes | independent_sizes(region) if call.sizes else call.sizes
    return serve(_TEXTS.setdefault(spelling, Text()), numbers, call.occurrence(spelling, numbers), apart, lower)


def _places(members: Members | None) -> Any:
    """The numbers of ``members``, their count first."""
    return members and (members.count, [(at.first, at.step, at.elements) for at in members.places])


def _text(region: GraphModule, places: Any) -> tuple[str, Numbers]:
    """The text that regions share if one kernel may serve them, and the numbers of this region."""
    return text_and_numbers(
        region, lambda node: plain_name(node.name) if node.op == "placeholder" else "", places, reals=True
    )


def remember(region: GraphModule, members: Members | None = None) -> None:
    """Keep the numbers of a region that the first call has inside a larger one, for calls that have it alone."""
    if (call := call_at_hand()) is not None and call.sizes is None:
        _for_sizes(region, members)


def count_varies(region: GraphModule, members: Members) -> bool:
    """Whether the count of ``members`` is a size that varies, and other calls had other counts of them."""
    call = call_at_hand()
    if call is None or members.count not in (call.sizes or ()):
        return False
    spelling, numbers = _text(region, _places(members))
    at = len(numbers) - 1 - 3 * len(members.places)  # three numbers of each place follow
    known = _TEXTS.get(spelling, Text())
    return any(other[at] != members.count for others in known.references.values() for other in others)


def serve(
    text: Text[Kernel], numbers: Numbers, occurrence: int, apart: frozenset[int] | None, lower: Lower[Kernel]
) -> Kernel | None:
    """The kernel of the family that serves a call, with the sizes of the call; records the call's numbers in
    ``text``."""
    found = text.member(numbers, occurrence, apart, lower) if apart is not None else None
    text.remember(occurrence, numbers)
    if found is None:
        return None
    family, sizes = found
    numbers = family.made.workspace_bytes, *_whole(family.made)
    return _at(family, sizes, family.conditions.evaluator(numbers))


def _whole(kernel: Kernel) -> list[int]:
    """The sizes of a kernel that are integers."""
    return [number for _, number in kernel.sizes if not isinstance(number, str)]


def _at(family: SizeFamily[Kernel], sizes: Numbers, evaluate: Callable[..., Numbers]) -> Kernel:
    """The kernel of a family for a call with these sizes, which it serves; ``evaluate`` computes its workspace and its
    :func:`_whole` sizes from them."""
    workspace, *whole = evaluate(*sizes)
    rest, of = iter(whole), family.conditions
    return replace(
        family.made,
        workspace_bytes=workspace,
        sizes=tuple(
            (name, _bits(sizes[of.sizes.index(number)]) if isinstance(number, str) else next(rest))
            for name, number in family.made.sizes
        ),
        served=Served(sizes, lambda others: _at(family, others, evaluate) if family.met(*others) else None),
    )


def _bits(number: float) -> int:
    """The bits of a double as an ``int64_t`` argument."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits


def lower_for_sizes(region: GraphModule, conditions: Conditions, members: Members | None = None) -> Kernel | None:
    """The kernel of a region with extents for sizes; None if the code needs their values."""
    try:
        with_sizes = _target(region).with_sizes
        if with_sizes is None:
            return None
        with _deep_recursion():
            kernel = _lower(region, members, "", Config(threads="decided in each call"))
    except (Unsupported, NotAffine, SplitNeeded, NeedsNumber):
        return None
    arguments = len(region.graph.find_nodes(op="placeholder")) + len(outputs_of(region.graph))
    place = BEFORE_ARGUMENTS if members else arguments + bool(kernel.workspace_bytes)
    reals = conditions.reals()
    source = with_sizes(kernel.source, conditions.sizes, place, reals)
    name = f"{readable_name(region)}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    sizes = tuple((size, size if size in reals else conditions.extent(size)) for size in conditions.sizes)
    return replace(kernel, name=name, source=source.replace(kernel.name, name), sizes=sizes)


def attempt(lowered: Callable[[], Made]) -> Made | Declined:
    """The result of ``lowered``, or the reason for its failure. An internal fault becomes a warning and a reason.

    >>> from torch.fx import Graph
    >>> attempt(lambda: 3), attempt(lambda: values_of(Graph().output(None)))
    (3, Declined(reason='output has no kernel'))
    """
    try:
        with _deep_recursion():
            return lowered()
    except (Unsupported, NotAffine, NeedsNumber) as why:
        return Declined(str(why))
    except SplitNeeded as need:
        return Declined(f"the kernel would have to split the loop over {need.atom}")
    except Exception as error:  # a fault in fuse costs a kernel, not the call
        warnings.warn(reason := reason_of_fault(error), FaultWarning, stacklevel=3)
        return Declined(reason)


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """Raise the recursion limit: code generation recurses a few frames per operator, through thousands of operators."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, MAX_RECURSION))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _lower(region: GraphModule, members: Members | None, key: str, config: Config) -> Kernel:
    computation = replace(computation_of(region), members=members)
    name = f"{readable_name(region)}_{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    made = _target(region).write(computation, name, config)
    in_place = frozenset() if members else _in_place_pairs(computation)
    return Kernel(
        name, made.source, in_place, made.parallel, made.workspace_bytes, (), made.headers, schedule=made.schedule
    )


def _target(region: GraphModule) -> Target:
    target = target_for(tensors_of(region))
    if isinstance(target, Declined):
        raise Unsupported(target.reason)
    return target


def target_for(values: Sequence[Tensor]) -> Target | Declined:
    """The target for a kernel on ``values``, which have to be on one device."""
    devices = {value.device.type for value in values}
    if len(devices) == 1 and devices <= set(TARGETS):
        return target_of(devices.pop())
    return Declined(f"there are no kernels for {' and '.join(sorted(devices))} yet")


def tensors_of(region: GraphModule) -> list[Tensor]:
    """Arguments and results of a region."""
    nodes = [*region.graph.find_nodes(op="placeholder"), *outputs_of(region.graph)]
    return [node.meta["val"] for node in nodes if isinstance(node.meta["val"], Tensor)]


def values_of_call(node: Node) -> list[Value] | Declined:
    """The values of one operator whose operands are all in memory, or the reason why it has none."""
    return attempt(lambda: values_of(node))


def _in_place_pairs(computation: Computation) -> frozenset[tuple[int, int]]:
    """(input, output) positions where each iteration of one pointwise nest reads the input only at the element
    stored."""
    values = [output.value for output in computation.outputs]
    if not _pointwise(values) or len({value.shape for value in values}) != 1:
        return frozenset()
    if len({o.strides for o in computation.outputs}) != 1:
        return frozenset()
    elsewhere = _read_elsewhere(values)
    pairs = set()
    for value in computation.inputs:
        if id(value) in elsewhere:
            continue
        for position, output in enumerate(computation.outputs):
            same = value.shape == output.value.shape and value.strides == output.strides
            if same and value.dtype.itemsize == output.value.dtype.itemsize:
                pairs.add((value.position, position))
    return frozenset(pairs)


def _pointwise(values: Iterable[Value]) -> bool:
    """Whether the values consist of maps, views and inputs only: no reductions, concatenations, gathers or padding."""
    below = within_stage(values, through_reductions=True)
    return not any(isinstance(value, (Concat, Reduce, Gather, Pad)) for value in below)


def _read_elsewhere(values: Iterable[Value]) -> set[int]:
    """The ids of values that some path from ``values`` reaches through anything but maps."""
    seen: set[tuple[int, bool]] = set()
    stack = [(value, True) for value in values]
    while stack:
        current, direct = stack.pop()
        if (id(current), direct) in seen:
            continue
        seen.add((id(current), direct))
        stack.extend((child, direct and isinstance(current, Map)) for child in children(current))
    return {value for value, direct in seen if not direct}


def structure(region: GraphModule, named: bool = True) -> str:
    """A text that is equal for regions with the same computation; ``named``: and the same names and source lines."""
    numbers: dict[Node, int] = {}
    lines = []
    for node in region.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            lines.append(f"{plain_name(node.name) if named else ''} {layouts(node)}")
        else:
            args = map_arg((node.args, node.kwargs), lambda n: NodeNumber(numbers[n]))  # type: ignore[arg-type,return-value]  # FX types arguments loosely
            lines.append(f"{node.target} {args!r} {layouts(node)} {node.meta.get('source', '') if named else ''}")
    return "\n".join(lines)


def readable_name(region: GraphModule) -> str:
    """A name from the first operators that are not views: ``sigmoid_mul_tanh``."""
    parts: dict[str, None] = {}
    for node in region.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem and not ops.is_view(node.target):
            parts[plain_name(str(node.target).split(".")[-2])] = None
    return "_".join(list(parts)[:MAX_NAME_PARTS]) or "copy"
