"""Outcomes of calls: results, writes, gradients, and the tensors that share memory.

    result, call   ->   CallOutcome   ->   differences between eager's outcome and the fused one, in words

Elements of tensors are compared elsewhere (compare.py).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fuse.check.inputs import CheckCall
from fuse.graph.structure.result_structure import named_parts, parts_of
from fuse.runtime.guards.call_guards import same_value


@dataclass(frozen=True)
class CallOutcome:
    """The state after one run, by name: results, inputs, other attributes of the model, gradients, aliases."""

    results: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
    attributes: Mapping[str, Any]
    gradients: Mapping[str, Tensor]
    aliases: Mapping[str, tuple[str, str, int]]
    kinds: tuple[Any, ...]


def outcome_of(result: Any, call: CheckCall, gradients: Mapping[str, Tensor]) -> CallOutcome:
    """The state after ``call`` returned ``result``."""
    results, inputs = named_parts(result), call.tensors()
    attributes = {f"attribute {name}": part for name, part in call.attributes().items()}
    return CallOutcome(results, inputs, attributes, gradients, _aliases(results, inputs), _kinds(result))


def gradients_of(call: CheckCall) -> dict[str, Tensor]:
    """The gradients of the call's parameters and inputs."""
    return {f"gradient of {n}": t.grad for n, t in call.tensors().items() if t.is_leaf and t.grad is not None}


def _kinds(result: Any, around: frozenset[int] = frozenset()) -> tuple[Any, ...]:
    """The classes of all containers in the result; ``around`` has those that ``result`` is in."""
    if id(result) in around:
        return (type(result),)
    inside = around | {id(result)}
    return type(result), *(_kinds(part, inside) for part in parts_of(result).values())


def _aliases(results: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> dict[str, tuple[str, str, int]]:
    """For every resulting tensor: the first name of the same object, the first with the same memory, and the offset
    there."""
    objects: dict[int, str] = {}
    storages: dict[int, str] = {}
    found = {}
    for name, tensor in (*inputs.items(), *results.items()):
        if isinstance(tensor, Tensor):
            same = objects.setdefault(id(tensor), name)
            shared = storages.setdefault(tensor.untyped_storage()._cdata, name)
            if name in results:
                found[name] = same, shared, int(tensor.storage_offset())
    return found


def values_of(outcome: CallOutcome) -> dict[str, Tensor]:
    """All tensors after a run, by name."""
    parts = (outcome.results, outcome.inputs, outcome.gradients)
    return {name: value for part in parts for name, value in part.items() if isinstance(value, Tensor)}


def structure_problems(fused: CallOutcome, eager: CallOutcome) -> list[str]:
    """Everything in which the fused call differs from eager's, apart from the elements of tensors."""
    problems = []
    for part in ("results", "gradients", "attributes"):
        mine, theirs = getattr(fused, part), getattr(eager, part)
        problems += [f"{name}: missing" for name in theirs.keys() - mine.keys()]
        problems += [f"{name}: eager has no such thing" for name in mine.keys() - theirs.keys()]
    for name, value in (*eager.results.items(), *eager.attributes.items()):
        mine = (fused.results if name in eager.results else fused.attributes).get(name)
        if type(mine) is not type(value):
            problems.append(f"{name}: {type(mine).__name__} instead of {type(value).__name__}")
        elif not isinstance(value, Tensor) and not _equal(mine, value):
            problems.append(f"{name}: {mine!r} instead of {value!r}")
        elif isinstance(mine, Tensor) and isinstance(value, Tensor) and mine.requires_grad != value.requires_grad:
            problems.append(f"{name}: requires_grad is {mine.requires_grad} instead of {value.requires_grad}")
    if fused.kinds != eager.kinds and not problems:
        problems.append("the result is made of other classes than eager's")
    for name, expected in eager.aliases.items():
        if (alias := fused.aliases.get(name)) is not None and alias != expected:
            problems.append(f"{name}: {_alias_text(name, alias)} instead of {_alias_text(name, expected)}")
    return problems


def _equal(mine: Any, theirs: Any) -> bool:
    """Whether two objects of one class are equal; those that cannot be compared, such as iterators, count as equal."""
    kind: Any = type(mine)
    if mine is theirs or same_value(mine, theirs):  # NaN is equal to NaN here
        return True
    if kind.__eq__ is object.__eq__ or isinstance(mine, weakref.ref):  # a weak reference is to the copy's own tensor
        return True
    if isinstance(mine, types.MethodType):  # a method of each copy of one object
        return bool(mine.__func__ is theirs.__func__ and type(mine.__self__) is type(theirs.__self__))
    try:
        return bool(mine == theirs)
    except (ValueError, RuntimeError):  # arrays compare element by element
        return str(mine) == str(theirs)


def _alias_text(name: str, alias: tuple[str, str, int]) -> str:
    same, shared, offset = alias
    if same != name:
        return f"the same tensor as {same}"
    where = "memory of its own" if shared == name else f"the memory of {shared}"
    return f"{where} from element {offset}"
