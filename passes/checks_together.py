"""Move the assertions of a loop's steps behind the loop, and remove those that always hold.

    for t: k = argmax(y)                          for t: k = argmax(y)
           assert all(k >= 0)             ->             ...
           assert all(h < 3)                             hs[t] = h
                                                  assert all(hs < 3)

A step that asserts something has an effect, and cannot be part of a kernel. An assertion has no result, and where it
fails, the call runs again in eager mode, which raises where the model does. So all steps may be checked after the last.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fuse import ops
from fuse.loops.rolling import LEAST_STEPS
from fuse.rewrite import surgery
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, rewrite

aten = torch.ops.aten

ASSERTIONS = (aten._assert_async.default, aten._assert_async.msg)


@register_pass(stage="clean", after="expand_lstm_layers")
def checks_together(graph: GraphModule) -> Iterator[Verdict]:
    """Move the assertions of a loop's steps behind the loop, and remove those that always hold."""
    groups: dict[Hashable, list[Node]] = {}
    for check in [node for op in ASSERTIONS for node in graph.graph.find_nodes(op="call_function", target=op)]:
        if holds(check.args[0]):
            yield rewrite(check, leave_out, [check])
            continue
        value: Tensor = checked(check).meta["val"]
        key = check.target, check.args[1:], check.meta.get("source", ""), value.shape, value.dtype
        groups.setdefault(key, []).append(check)
    for checks in groups.values():
        if len(checks) >= LEAST_STEPS:
            yield rewrite(checks[0], check_at_once, checks)


def checked(check: Node) -> Node:
    """The tensor all of whose elements have to be true."""
    value: Node = check.args[0]  # type: ignore[assignment]  # as the schema says
    while value.target is aten.all.default:
        (value,) = value.args  # type: ignore[assignment]
    return value


def holds(condition: object) -> bool:
    """Whether ``condition`` is true for any input: it compares classes that an ``argmax`` has found with their
    number."""
    if not isinstance(condition, Node):
        return False
    if condition.target is aten.all.default:
        return len(condition.args) == 1 and holds(condition.args[0])
    if condition.target in (aten.bitwise_and.Tensor, aten.logical_and.default):
        return all(map(holds, condition.args))
    if condition.target not in (aten.ge.Scalar, aten.lt.Scalar):
        return False
    value, bound = condition.args
    classes = number_of_classes(value)
    if classes is None:
        return False
    if not isinstance(bound, int):
        return False
    return bound <= 0 if condition.target is aten.ge.Scalar else bound >= classes


def number_of_classes(value: object) -> int | None:
    """The number of classes among which an ``argmax`` has found ``value``; None if no ``argmax`` has."""
    while isinstance(value, Node) and ops.is_view(value.target):
        value = value.args[0]
    if not isinstance(value, Node) or value.target is not aten.argmax.default or len(value.args) < 2:
        return None
    source: Tensor = value.args[0].meta["val"]  # type: ignore[union-attr]  # as the schema says
    dim = value.args[1]
    return source.shape[dim] if isinstance(dim, int) and source.dim() else None


def leave_out(checks: list[Node]) -> None:
    for check in checks:
        condition = check.args[0]
        check.graph.erase_node(check)
        if isinstance(condition, Node):
            surgery.erase(condition)


def check_at_once(checks: list[Node]) -> None:
    last = checks[-1]
    values = surgery.insert(last, aten.stack.default, [checked(check) for check in checks])
    surgery.insert(last, last.target, surgery.insert(last, aten.all.default, values), *last.args[1:])  # type: ignore[arg-type]
    leave_out(checks)
