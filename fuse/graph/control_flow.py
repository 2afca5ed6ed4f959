"""Loops and branches of ``torch._higher_order_ops`` as the Python that they stand for.

    while_loop(cond, body, (i, h))      ->      while cond(i, h): i, h = body(i, h)
    scan(step, h, xs)                   ->      for x in xs: h, y = step(h, x); ys.append(y)
    torch.cond(p, f, g, (x,))           ->      f(x) if p else g(x)

Eager compiles these functions for the operands at hand; what is recorded is the loop that was unrolled or the branch
that was taken, and what was read to decide that is learned like any value that ``forward`` reads.
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
    """The result of ``function``, which eager would compile, for ``args``.

    Raises:
        CaptureError: it is not known. To compile it while a call is recorded would fail, and later calls with it.
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
            raise CaptureError(f"the body of a while_loop returns {len(states)} values of {len(carried)}")
        going = _truth(condition(*states, *others))
    return following


def _as_given(states: list[Any], condition: Any) -> Any:
    """States in the structure in which the user gave them, which PyTorch's wrapper of the condition knows."""
    inside = zip(condition.__code__.co_freevars, condition.__closure__ or (), strict=True)
    structure = {name: cell.cell_contents for name, cell in inside}.get("in_spec")
    if not isinstance(structure, pytree.TreeSpec):
        raise CaptureError("a while_loop runs no step, and what it returns then is not known; it runs in eager mode")
    return pytree.tree_unflatten(states, structure)[0]


def _truth(value: Any) -> bool:
    if isinstance(value, Tensor) and (value.dtype is not torch.bool or value.dim()):
        raise CaptureError("the condition of a while_loop is no boolean of no dimensions; it runs in eager mode")
    return bool(value)


def _scan(step: Callable[..., Any], states: list[Tensor], inputs: list[Tensor]) -> Any:
    """Last states and, side by side, the results of all steps, both in the structure in which ``step`` returns them."""
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
