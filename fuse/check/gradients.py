"""Hold a pattern's own ``backward`` to the gradients of what the pattern computes.

    autograd over the pattern, in float64      every gradient equal, on every call that is tried
    differences of the pattern's results       torch.autograd.gradcheck, on the usual calls

Where autograd has no gradient of the pattern's operators, the differences alone decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.check.compare import compare
from fuse.check.samples import Sample
from fuse.errors import FuseError
from fuse.rewrite.patterns.backward import operator_of
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.language import running

TOLERANCE = 1e-9
"""Of the largest gradient, in float64: what another order of sums may cost. A wrong formula costs more."""

MOST_ELEMENTS = 300
"""Of real inputs; with more, gradcheck projects them onto one direction."""


def wrong_gradient(pattern: Pattern, sample: Sample, *, differences: bool) -> tuple[str, int]:
    """What is wrong with the gradients of ``pattern`` on ``sample``, and how many are right.

    ``differences``: they are held to differences of the results, too.
    """
    arguments = wide(sample.arguments())
    leaves, spec = pytree.tree_flatten(arguments)
    real = [leaf for leaf in leaves if leaf.is_floating_point()]
    if not real:
        return "", 0
    operator = operator_of(pattern, lambda: running(sample.environment))

    def own(*given: Tensor) -> Any:
        tensors = iter(given)
        return operator(spec, *(next(tensors) if leaf.is_floating_point() else leaf for leaf in leaves))

    try:
        with torch.no_grad():
            own(*real)
    except Exception:  # the pattern itself does not run in float64
        return "", 0
    try:
        mine = _gradients(lambda: own(*real), real)
    except Exception as error:  # whatever the user's backward raises
        said = str(error).splitlines() or [""]
        return said[0] if isinstance(error, FuseError) else f"backward fails, {type(error).__name__}: {said[0]}", 0
    count, problem = _like_autograds(pattern, sample, arguments, mine)
    if not problem and differences:
        problem = _like_differences(own, real)
    return problem, count


def wide(arguments: Sequence[Any]) -> list[Any]:
    """Copies of the tensors, those of real numbers in float64 and ready for gradients."""

    def copy(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        return tensor.detach().to(torch.float64, copy=True).requires_grad_()

    found: list[Any] = pytree.tree_map_only(Tensor, copy, list(arguments))
    return found


def _gradients(function: Callable[[], Any], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Those of ``leaves``, from unequal gradients of the results."""
    with torch.enable_grad():
        results = [one for one in pytree.tree_leaves(function()) if one.requires_grad]
    weights = [torch.linspace(0.5, 1.5, one.numel(), dtype=one.dtype).reshape(one.shape) for one in results]
    return list(torch.autograd.grad(results, leaves, weights, allow_unused=True))


def _like_autograds(
    pattern: Pattern, sample: Sample, arguments: Sequence[Any], mine: Sequence[Tensor | None]
) -> tuple[int, str]:
    names = [
        parameter.name
        for parameter, argument in zip(pattern.parameters, arguments, strict=True)
        for leaf in pytree.tree_leaves(argument)
        if leaf.is_floating_point()
    ]
    leaves = [leaf for leaf in pytree.tree_leaves(arguments) if leaf.is_floating_point()]

    def plain() -> Any:
        with running(sample.environment):
            return pattern.function(*arguments)

    try:
        wanted = _gradients(plain, leaves)
    except Exception:  # autograd has none
        return 0, ""
    count = 0
    for name, have, want in zip(names, mine, wanted, strict=True):
        zero = torch.zeros(())
        if have is None and want is not None and not bool((want == zero).all()):
            return count, f"backward gives no gradient of {name}, and the pattern has one"
        if have is None or want is None:
            if have is not None and not bool((have == zero).all()):
                return count, f"backward gives a gradient of {name}, and the pattern has none"
            continue
        finite = want[torch.isfinite(want)]
        atol = TOLERANCE * (finite.abs().max().item() if finite.numel() else 0.0)
        if problem := compare("", have.contiguous(), want.contiguous(), None, atol=atol).problem:
            return count, f"backward: gradient of {name}: {problem}"
        count += 1
    return count, ""


def _like_differences(own: Callable[..., Any], real: Sequence[Tensor]) -> str:
    """What ``gradcheck`` has to say."""
    fast = sum(leaf.numel() for leaf in real) > MOST_ELEMENTS
    try:
        torch.autograd.gradcheck(own, tuple(real), fast_mode=fast)
    except Exception as error:  # gradcheck, or the user's backward
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"backward: {(lines or ['gradcheck fails'])[0].rstrip(',')}"
    return ""
