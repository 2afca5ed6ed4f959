"""Run loops and branches of ``torch._higher_order_ops`` as plain Python.

    while_loop(cond, body, (i, h))      ->      while cond(i, h): i, h = body(i, h)
    scan(step, h, xs)                   ->      for x in xs: h, y = step(h, x); ys.append(y)
    torch.cond(p, f, g, (x,))           ->      f(x) if p else g(x)

Eager compiles these functions at each call. The record has the unrolled loop, or the branch taken. The conditions are
learned like any value that ``forward`` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.errors import CaptureError
from fuse.graph.sources import user_line


def run_plainly(function: Any, args: tuple[Any, ...]) -> Any:
    """The result of ``function(*args)``, where eager would compile ``function``.

    Raises:
        CaptureError: ``function`` is not known here. Compiling it during a recording fails, and makes later calls fail.
    """
    name = getattr(function, "__qualname__", "")
    for known, run in _KNOWN.items():
        if name.startswith(known):
            return run(*args)
    raise CaptureError(f"PyTorch compiles the function called at {user_line()} itself; it runs in eager mode")


def _branch(truth: Any, then: Callable[..., Any], otherwise: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    return then(*operands) if truth else otherwise(*operands)


def _while(condition: Callable[..., Any], body: Callable[..., Any], carried: Any, others: tuple[Any, ...]) -> Any:
    states = tuple(carried)
    if not _truth(condition(*states, *others)):
        return _as_given([state.clone() if isinstance(state, Tensor) else state for state in states], condition)
    going = True
    while going:
        following = body(*states, *others)
        states = tuple(pytree.tree_leaves(following))
        if len(states) != len(carried):
            raise CaptureError(f"the body of a while_loop returns {len(states)} values instead of {len(carried)}")
        going = _truth(condition(*states, *others))
    return following


def _as_given(states: list[Any], condition: Any) -> Any:
    """``states`` in the structure that the user gave, which PyTorch's wrapper of the condition knows."""
    inside = zip(condition.__code__.co_freevars, condition.__closure__ or (), strict=True)
    structure = {name: cell.cell_contents for name, cell in inside}.get("in_spec")
    if not isinstance(structure, pytree.TreeSpec):
        raise CaptureError(
            "a while_loop runs no step, so that the structure of its result is unknown; it runs in eager mode"
        )
    return pytree.tree_unflatten(states, structure)[0]


def _truth(value: Any) -> bool:
    if isinstance(value, Tensor) and (value.dtype is not torch.bool or value.dim()):
        raise CaptureError("the condition of a while_loop is not a boolean without dimensions; it runs in eager mode")
    return bool(value)


def _scan(step: Callable[..., Any], states: list[Tensor], inputs: list[Tensor]) -> Any:
    """The last states, and the stacked results of all steps, both in the structure that ``step`` returns."""
    kept: list[list[Any]] = []
    for number in range(len(inputs[0])):
        last, results = step(*states, *(one.select(0, number) for one in inputs))
        states = pytree.tree_leaves(last)
        leaves, structure = pytree.tree_flatten(results)
        kept.append(leaves)
    stacked = [None if leaves[0] is None else torch.stack(leaves) for leaves in zip(*kept, strict=True)]
    return last, pytree.tree_unflatten(stacked, structure)


_KNOWN: dict[str, Callable[..., Any]] = {
    "cond.": _branch,
    "while_loop.": _while,
    "scan.": _scan,
}
