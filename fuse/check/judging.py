"""One call of a pattern and of its replacement, judged: right, raised or wrong. All trials end here.

    results of replace   ==   results of pattern     dtypes, shapes and elements, NaN and infinities too
    error                <=   rounding of the terms that either sums to the element (:mod:`fuse.check.sizes`)

A replacement may add in another order and cancel where the pattern does not. A wrong formula differs by more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.check.compare import compare
from fuse.check.sizes import Jittered, sizes
from fuse.graph.describing import dtype_and_shape
from fuse.graph.fakes.fake_operators import unlogged
from fuse.rewrite.patterns.call_classes import RIGHT, Trial
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.language import Environment, running

Function = Callable[..., Any]

FLOAT64 = torch.finfo(torch.float64).eps


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's logs and the tested functions' warnings: a trial causes them, not the user."""
    with unlogged(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def judged_call(pattern: Pattern, arguments: Sequence[Any], environment: Environment) -> Trial | None:
    """The verdict on one call of ``pattern`` and its replacement; None if the pattern itself does not run."""
    assert pattern.replace is not None
    function, replace = within(pattern.function, environment), within(pattern.replace, environment)
    with torch.no_grad():
        try:
            wanted = results(function, arguments)
        except Exception:  # the user's function may raise anything
            return None
        try:
            found = results(replace, arguments)
        except Exception as error:
            return Trial("raised", f"replace raises {said(error)}")
        if len(found) != len(wanted):
            return Trial("wrong", f"replace gives {len(found)} results, the pattern {len(wanted)}")
        exact = in_float64(function, arguments)
    size = cache(partial(sizes_of, [function, replace], arguments, unit_of(wanted)))
    for number, (mine, want) in enumerate(zip(found, wanted, strict=True)):
        if (mine.dtype, mine.shape) != (want.dtype, want.shape):
            return Trial("raised", f"replace gives {dtype_and_shape(mine)}, the pattern {dtype_and_shape(want)}")
        reference = exact[number] if exact is not None else None
        own = numbered(size, number)
        if problem := difference(f"result {number}", mine.contiguous(), want.contiguous(), reference, own):
            return Trial("wrong", problem)
    return RIGHT


def runs(pattern: Pattern, arguments: Sequence[Any], environment: Environment) -> bool:
    """Whether the pattern itself takes these arguments."""
    try:
        with torch.no_grad():
            results(within(pattern.function, environment), arguments)
    except Exception:  # the user's function may raise anything
        return False
    return True


def difference(
    name: str, mine: Tensor, eager: Tensor, reference: Tensor | None, size: Callable[[int], Tensor | None]
) -> str:
    """The difference of ``mine`` from ``eager`` beyond rounding, or ''; ``reference`` is the float64 result."""
    usable = reference is not None and reference.shape == eager.shape
    exact = None if reference is None or not usable else reference.contiguous()
    problem = compare(name, mine, eager, exact, size=size).problem
    return f"{name}: {problem}" if problem else ""


def results(function: Function, arguments: Sequence[Any]) -> list[Any]:
    """Results of ``function`` for copies of ``arguments``, as a list."""
    given = pytree.tree_map_only(Tensor, _copy, list(arguments))
    answer = function(*given)
    return list(answer) if isinstance(answer, (tuple, list)) else [answer]


def in_float64(function: Function, arguments: Sequence[Any]) -> list[Any] | None:
    """The results of ``function`` in float64; None if it does not run in float64."""
    try:
        return results(function, pytree.tree_map_only(Tensor, as_float64, list(arguments)))
    except Exception:  # not every function runs in float64
        return None


def as_float64(tensor: Tensor) -> Tensor:
    """A copy, in float64 if the tensor is floating-point."""
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def sizes_of(functions: Sequence[Function], arguments: Sequence[Any], unit: float, runs: int) -> list[Tensor | None]:
    """The sizes of the results of ``functions``, which compute the same, in float64: the largest of each."""
    found: list[Tensor | None] = []
    for function in functions:
        exact = in_float64(function, arguments)
        for place, size in enumerate(_sizes(function, arguments, exact, unit, runs) if exact is not None else []):
            if place == len(found):
                found.append(size)
            elif size is not None:
                known = found[place]
                found[place] = size if known is None or known.shape != size.shape else torch.maximum(known, size)
    return found


def _sizes(
    function: Function, arguments: Sequence[Any], exact: Sequence[Tensor | None], unit: float, runs: int
) -> Sequence[Tensor | None]:
    def run(mode: Jittered) -> list[Tensor | None]:
        given = pytree.tree_map_only(Tensor, lambda one: as_float64(one).contiguous(), list(arguments))
        mode.move(one for one in pytree.tree_leaves(given) if isinstance(one, Tensor))
        with mode:
            return list(results(function, given))

    try:
        return sizes(run, exact, unit, runs)
    except Exception:  # the function may fail on other numbers
        return []


def unit_of(tensors: Sequence[Tensor]) -> float:
    """The last place of 1 in the coarsest floating-point dtype."""
    return max((torch.finfo(one.dtype).eps for one in tensors if one.is_floating_point()), default=FLOAT64)


def said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def gradients(function: Function) -> Callable[..., list[Tensor | None]]:
    """Autograd's gradients of the results of ``function``, for each of its floating-point arguments.

    The gradients of the results run from 0.5 to 1.5, because equal ones would cancel in a softmax.
    """

    def run(*arguments: Any) -> list[Tensor | None]:
        def leaf(one: Tensor) -> Tensor:
            return one.detach().requires_grad_() if one.is_floating_point() else one

        given = pytree.tree_map_only(Tensor, leaf, list(arguments))
        leaves = [one for one in pytree.tree_leaves(given) if isinstance(one, Tensor) and one.requires_grad]
        with torch.enable_grad():
            found = [
                one for one in pytree.tree_leaves(function(*given)) if isinstance(one, Tensor) and one.requires_grad
            ]
        weights = [torch.linspace(0.5, 1.5, one.numel(), dtype=one.dtype).reshape(one.shape) for one in found]
        return list(torch.autograd.grad(found, leaves, weights, allow_unused=True))

    return run


def within(function: Function, environment: Environment) -> Function:
    """``function``, run in the environment of a pattern's constants and alternatives."""

    def run(*arguments: Any) -> Any:
        with running(environment):
            return function(*arguments)

    return run


def numbered(size: Callable[[int], Sequence[Tensor | None]], number: int) -> Callable[[int], Tensor | None]:
    """The size of result ``number``, if it has one."""

    def one(runs: int) -> Tensor | None:
        found = size(runs)
        return found[number] if number < len(found) else None

    return one


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the strides of ``tensor``; an expanded tensor itself."""
    shares = any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if shares:
        return tensor
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
