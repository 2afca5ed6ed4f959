"""Why a call is captured although others were: how it differs from the captured call that is most like it.

    captured                          a later call
    f(x [5, 3]), f(x [9, 3])          f(x [9, 4])         x has shape [9, 4] instead of [9, 3]
    under torch.no_grad()             with gradients      torch.is_grad_enabled() is True instead of False
    model.eval()                      model.train()       training of the model changed

Objects of the user are named by their class: their methods are not called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from fuse.graph.naming import argument_name, parameter_names
from fuse.graph.structure.arguments import named_leaves
from fuse.runtime.guards.call_guards import CallGuard, modes, same_value
from fuse.runtime.guards.state_guard import StateGuard
from fuse.runtime.variants.states import States

MOST_DIFFERENCES = 3
"""Most differences that are named."""
LONGEST_VALUE = 40
"""Most characters of a value that is named."""
SHAPE = " has shape "
_PLAIN = frozenset((int, float, complex, bool, str, bytes, NoneType, torch.dtype, torch.device))
_STRUCTURE = "its arguments have another structure"
_MODES = (
    "torch.is_grad_enabled()",
    "torch.is_inference_mode_enabled()",
    "autocast",
    "torch.get_default_dtype()",
    "the default device",
    "torch.are_deterministic_algorithms_enabled()",
    "forward-mode differentiation",
)
"""Names of :func:`fuse.runtime.guards.call_guards.modes`."""
_MISMATCH = re.compile(r"tensor '(.*)' (.*?) mismatch.*?\. (expected .*?)\.?")


def why_recaptured(
    states: States, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any], spec: Any
) -> str:
    """How a call, which no variant serves, differs from the captured one that is most like it; empty if there is none.

    ``leaves`` and ``spec`` are its arguments, taken apart.
    """
    captured = [state for state in states if any(compiled.program is not None for compiled in state.variants)]
    held = [state for state in captured if state.guard.holds()]
    if not held:
        return _of_state(captured[0].guard, model) if captured else ""
    positional = parameter_names(model)
    names = [argument_name(path, positional) for path, _ in named_leaves(args, kwargs)[0]]
    of_model = {id(tensor): name for name, tensor in chain(model.named_buffers(), model.named_parameters())}
    found = []
    for compiled in (compiled for state in held for compiled in state.variants if compiled.program is not None):
        given = compiled.carried.extend(leaves, spec) if compiled.carried else (leaves, spec)
        attributes = ["an attribute"] * (len(given[0]) - len(names))
        found.append(_of_call(compiled.guard, *given, [*names, *attributes], of_model))
    nearest = min(found, key=_distance)
    more = len(nearest) - MOST_DIFFERENCES
    return "; ".join([*nearest[:MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])


def _distance(differences: Sequence[str]) -> tuple[bool, int, int]:
    """How unlike a call is: its structure counts most, then torch's modes and sizes, then all other differences."""
    large = sum(one.startswith(_MODES) or SHAPE in one for one in differences)
    return _STRUCTURE in differences, large, len(differences)


def _of_state(guard: StateGuard, model: nn.Module) -> str:
    """The first part of the model that is no longer as a guard has it."""
    changed = guard.changed()
    if changed is None:
        return "hooks of the model changed"
    live, key = changed
    owner = next((name for name, module in model.named_modules() if module.__dict__ is live), None)
    return f"{key} of {owner or 'the model' if owner is not None else 'an object in the model'} changed"


def _of_call(
    guard: CallGuard, leaves: Sequence[Any], spec: Any, names: Sequence[str], of_model: Mapping[int, str]
) -> list[str]:
    """The differences between a call, whose leaves have these ``names``, and that of a guard. ``of_model``: names of
    the model's tensors, by ``id``."""
    if len(leaves) != guard.count or spec != guard.spec:
        return [_STRUCTURE]
    found = []
    for name, now, had in zip(_MODES, modes(), guard.modes, strict=True):
        if now != had:
            found.append(f"{name} is {now} instead of {had}")
    for index, value in guard.values:
        if not same_value(leaves[index], value):
            found.append(f"{names[index]} is {_short(leaves[index])} instead of {_short(value)}")
    for index, size in guard.sizes:
        leaf = leaves[index]
        if isinstance(leaf, Tensor) and leaf.shape != size:
            found.append(f"{names[index]}{SHAPE}{list(leaf.shape)} instead of {list(size)}")
    for first, second in guard.repeated:
        if leaves[first] is not leaves[second]:
            found.append(f"{names[first]} and {names[second]} are two tensors")
    for index, tensor in guard.pinned:
        if leaves[index] is not tensor:
            found.append(f"{names[index]} is no tensor of the model")
    if not guard.in_context():
        found.append("a context variable has another value")
    return found or [_of_tensors(guard, leaves, names, of_model)]


def _of_tensors(guard: CallGuard, leaves: Sequence[Any], names: Sequence[str], of_model: Mapping[int, str]) -> str:
    """The first fact about a tensor that differs, such as its dtype."""
    tensors = guard.pick((*leaves, *guard.state))
    named = guard.pick((*names, *(of_model.get(id(tensor), "a tensor") for tensor in guard.state)))
    verbose = getattr(getattr(guard.check, "__self__", None), "check_verbose", None)
    told = _MISMATCH.fullmatch(str(verbose(*tensors, tensor_check_names=list(named)) if verbose else ""))
    return "{}: another {} ({})".format(*told.groups()) if told else "a tensor, or a value that is read, is another"


def _short(value: object) -> str:
    """A value as text; of an object of the user, whose methods are not called, only its class."""
    text = repr(value) if type(value) in _PLAIN else ""
    return text if text and len(text) <= LONGEST_VALUE else f"another {type(value).__name__}"
