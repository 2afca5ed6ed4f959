"""The conditions for rewriting a match: the pattern's demands, and effects that must not change.

    constraint          fuse.tensor(...) of a parameter, or check(m)
    in a loop kernel    the loop around it is one launch already
    refused             a test of the pattern failed, or failed for calls like this one
    used outside        another operator reads a value between the pattern's inputs and its results
    alias or mutation   the pattern draws random numbers, or the caller would notice a result's memory
    not convex          a path leads from one result, around the pattern, back into it

Each check returns a reason or None; the user reads the reasons.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.errors import FuseError
from fuse.graph.describing import dtype_name
from fuse.graph.outputs import outputs_of, worked_out
from fuse.graph.signature import Signature
from fuse.rewrite import effects, regions, surgery
from fuse.rewrite.patterns.definition import Failure, Match
from fuse.rewrite.patterns.differences import called
from fuse.rewrite.patterns.exact_match import Bound, FoundMatch
from fuse.rewrite.patterns.forms import InputKey
from fuse.rewrite.patterns.language import ManySpec, TensorSpec

aten = torch.ops.aten

Answer = TypeVar("Answer")

VerdictKind = Literal[
    "structure",
    "constraint",
    "alias or mutation",
    "used outside",
    "not convex",
    "overlapped",
    "refused by lowering",
    "refused",
    "in a loop kernel",
    "matched",
]
"""The kinds of verdicts on a candidate, from the earliest check to the last."""

SAVED = "the gradient is computed from it"
"""The reason for an output that nothing in the forward graph reads: the backward graph reads it."""

MAX_WALK = 5000
"""The most nodes visited to find a path back into one match."""


@dataclass(frozen=True)
class Misfit:
    """Why a match is not used: the kind of verdict, the reason, its node, and the change to the pattern that would
    help."""

    kind: VerdictKind
    reason: str
    node: Node | None = None
    change: str = ""


class Surroundings:
    """Facts about the graph for all matches, each computed once."""

    def __init__(self, graph: GraphModule) -> None:
        self.graph = graph
        self.results = set(effects.results(graph))
        self.escaping = effects.escaping(graph)
        self.position = {node: position for position, node in enumerate(graph.graph.nodes)}
        self._fixed: dict[Node, bool] = {}
        self._known: dict[Hashable, Any] = {}
        signature: Signature | None = graph.meta.get("signature")
        placeholders = graph.graph.find_nodes(op="placeholder")
        kinds = [spec.kind for spec in signature.inputs] if signature else []
        for node, kind in zip(placeholders, kinds, strict=False):
            self._fixed[node] = kind != "argument"

    def known(self, key: Hashable, find: Callable[[], Answer]) -> Answer:
        """The result of ``find``, computed once for each ``key``."""
        if key not in self._known:
            self._known[key] = find()
        answer: Answer = self._known[key]
        return answer

    @cached_property
    def _returned(self) -> set[Node]:
        """The outputs of the graph, except values that are written to its inputs."""
        signature: Signature | None = self.graph.meta.get("signature")
        written = {mutation.value_index for mutation in signature.mutations} if signature else set()
        own = outputs_of(self.graph.graph)[: self.graph.meta.get("saved_from")]
        return {output for position, output in enumerate(own) if position not in written}

    def why_output(self, node: Node) -> str:
        """Why ``node`` is an output of the graph."""
        if node not in self.results:
            return SAVED
        return "the model returns it" if node in self._returned else "it is written to an input of the model"

    def is_fixed(self, node: Node) -> bool:
        """Whether ``node`` has the same value in every call until a weight changes."""

        def of(one: Node) -> bool:
            pure = one.op == "call_function" and effects.is_pure(one)
            return pure and all(self._fixed[operand] for operand in one.all_input_nodes)

        return worked_out(node, self._fixed, of)


def obstacle(found: FoundMatch, around: Surroundings) -> Misfit | None:
    """The first reason not to rewrite ``found``, or None."""
    return (
        _unmet(found, around)
        or _impure(found)
        or _unread(found)
        or _used_outside(found, around)
        or _alias(found, around)
        or _not_convex(found, around)
    )


# ---- what the pattern demands --------------------------------------------------------------------------------------


def _unmet(found: FoundMatch, around: Surroundings) -> Misfit | None:
    known: dict[str, Any] = {}
    specs = found.form.pattern.constrained
    for (name, _), given in _in_order(found) if specs else ():
        if name in specs and (reason := _unlike(name, specs[name], given, known, around)):
            return Misfit("constraint", reason, given.node, f"another fuse.tensor(...) for {name!r}")
    return _rejected(found)


def _rejected(found: FoundMatch) -> Misfit | None:
    """The verdict of the pattern's ``check``."""
    pattern = found.form.pattern
    if pattern.check is None:
        return None
    with _named_nodes(found) as names:
        match = Match(found.inside, tuple(output.node for output in found.outputs), names)
        try:
            answer = pattern.check(match)
        except Exception as error:  # any error of the user's function
            raise FuseError(
                f"pattern {pattern.name!r} ({pattern.source}): check failed, {type(error).__name__}: {error}"
            ) from error
    if answer is None:
        return None
    if not isinstance(answer, Failure):
        return Misfit("constraint", f"check returned {answer!r} instead of None or m.fail(...)")
    return Misfit("constraint", answer.reason, answer.node, "another check(self, m)")


@contextmanager
def _named_nodes(found: FoundMatch) -> Iterator[dict[str, Any]]:
    """A context with everything that a pattern names, by name: nodes, constants, alternatives.

    While it lasts, the graph has a node for each input whose dimensions are permuted.
    """
    views: list[Node] = []
    names: dict[str, Any] = {}

    def node_of(given: Bound) -> Node:
        if given.dims is None:
            return given.node
        views.append(surgery.insert(given.node.next, aten.permute.default, given.node, list(given.dims)))
        return views[-1]

    for parameter in found.form.pattern.parameters:
        nodes = [node_of(given) for (name, _), given in _in_order(found) if name == parameter.name]
        names[parameter.name] = nodes if isinstance(parameter.spec, ManySpec) else nodes[0] if nodes else None
    try:
        yield {**names, **found.constants, **found.form.choices}
    finally:
        surgery.erase(*views)


def _unlike(name: str, spec: TensorSpec, given: Bound, known: dict[str, Any], around: Surroundings) -> str | None:
    """Why a tensor does not meet ``spec``, or None; ``known`` has the sizes and dtypes of names so far."""
    value = given.value()
    dtypes, by_name = spec.dtypes, isinstance(spec.dtype, str)
    if by_name:
        dtypes = (known.setdefault(f"dtype {spec.dtype}", value.dtype),)
    if dtypes and value.dtype not in dtypes:
        wanted = " or ".join(map(dtype_name, dtypes))
        called = f" (`{spec.dtype}`)" if by_name else ""
        return f"`{name}` is {dtype_name(value.dtype)}, the pattern wants {wanted}{called}"
    if spec.device is not None and value.device.type != spec.device:
        return f"`{name}` is on {value.device.type}, the pattern wants {spec.device}"
    if spec.layout is not None and not value.is_contiguous(memory_format=_FORMATS[spec.layout]):
        return f"`{name}` is not {spec.layout}"
    if spec.constant is not None and around.is_fixed(given.node) != spec.constant:
        return f"`{name}` {'changes from call to call' if spec.constant else 'is the same in every call'}"
    return _other_shape(name, spec, value, known)


def _other_shape(name: str, spec: TensorSpec, value: Tensor, known: dict[str, Any]) -> str | None:
    if not spec.shape:
        return None
    shape = list(spec.shape)
    if ... in shape:
        gap = shape.index(...)
        shape[gap : gap + 1] = [None] * (value.dim() - len(shape) + 1)
    if len(shape) != value.dim():
        return f"`{name}` has {value.dim()} dimensions, the pattern wants {len(shape)}"
    for dim, (want, size) in enumerate(zip(shape, value.shape, strict=True)):
        have = int(size)
        wanted = known.setdefault(want, have) if isinstance(want, str) else want
        if wanted is not None and wanted != have:
            called = f" (`{want}`)" if isinstance(want, str) else ""
            return f"dimension {dim} of `{name}` is {have}, the pattern wants {wanted}{called}"
    return None


_FORMATS: Mapping[str, torch.memory_format] = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
}


# ---- what must not be lost -----------------------------------------------------------------------------------------


def _impure(found: FoundMatch) -> Misfit | None:
    for node in found.inside:
        if not effects.is_pure(node):
            random = ops.is_random(node.target)
            reason = "draws random numbers, in an order that must stay" if random else "does more than give its value"
            return Misfit("alias or mutation", f"`{called(node)}` {reason}", node)
    return None


def _unread(found: FoundMatch) -> Misfit | None:
    if any(output.node.users for output in found.outputs if not output.is_input):
        return None
    return Misfit("used outside", "nothing reads the results", found.outputs[0].node)


def _used_outside(found: FoundMatch, around: Surroundings) -> Misfit | None:
    """A value between inputs and results that another node reads. Views of results may be read."""
    inside = set(found.inside)
    results = {output.node for output in found.outputs}
    for node in found.inside:
        user = next((user for user in node.users if user not in inside), None)
        if user is None or regions.owner(node) not in inside or regions.is_constructor(node):
            continue
        if _looks_at(node, results):
            continue
        if found.form.pattern.replace is None and any(_looks_at(result, {node}) for result in results):
            continue  # a region also returns the base of a result that is a view
        value = node
        if user.target is operator.getitem and user.users:
            value, user = user, next(iter(user.users))
        reader = around.why_output(value) if user.op == "output" else f"`{called(user)}` reads it, too"
        change = (
            "a method backward(self, grad, ...)" if reader == SAVED else "return it as one more result of the pattern"
        )
        return Misfit("used outside", f"`{called(value)}` is used outside: {reader}", node, change)
    return None


def _looks_at(node: Node, values: set[Node]) -> bool:
    """Whether ``node`` is one of ``values``, or a view of one."""
    current: Node | None = node
    while current is not None and current not in values:
        current = effects.view_base(current)
    return current is not None


def _alias(found: FoundMatch, around: Surroundings) -> Misfit | None:
    """A result that is a view of an input; a replacement would have memory of its own."""
    if found.form.pattern.replace is None:
        return None
    inside = set(found.inside)
    for output in found.outputs:
        seen = output.node in around.escaping and regions.owner(output.node) not in inside
        if seen and not output.is_input:
            return Misfit("alias or mutation", "a result is a view of an input, and the caller sees it", output.node)
    return None


def _not_convex(found: FoundMatch, around: Surroundings) -> Misfit | None:
    """A path from a result, around the pattern, and back into it. A view of an input counts as the input."""
    inside = set(found.inside)
    last = max(around.position[node] for node in inside)
    starts = [node for node in found.inside if regions.owner(node) in inside]
    stack = [user for node in starts for user in node.users if user not in inside]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in inside:
            return Misfit("not convex", "a path leads out of the pattern and back into it", node)
        if node in seen or around.position.get(node, 0) > last:
            continue
        seen.add(node)
        if len(seen) > MAX_WALK:
            return Misfit("not convex", "its nodes lie too far apart to be sure that no path leads back into it")
        stack.extend(node.users)
    return None


def _in_order(found: FoundMatch) -> list[tuple[InputKey, Bound]]:
    return sorted(found.inputs.items(), key=lambda item: item[0])
