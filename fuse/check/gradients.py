"""Compare a pattern's own ``backward`` with the true gradients of the pattern.

    autograd over the pattern, in float64      every gradient equal, on every call that is tried
    finite differences of its results          torch.autograd.gradcheck, on the usual calls

If autograd has no gradient of the pattern's operators, the finite differences alone decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.check.judging import FLOAT64, as_float64, difference, gradients, numbered, said, sizes_of, within
from fuse.check.sizes import is_real
from fuse.errors import FuseError
from fuse.rewrite.patterns.backward import operator_of
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.language import Environment, running

MOST_ELEMENTS = 300
"""The most input elements that gradcheck checks one by one; with more, it checks one random direction."""


def wrong_gradient(
    pattern: Pattern, given: Sequence[Any], environment: Environment, *, differences: bool
) -> tuple[str, int]:
    """The first fault of the pattern's gradients in the call ``given``, or '', and the number of right gradients.

    With ``differences``, they are compared with finite differences too; without, only if autograd has no gradient.
    """
    arguments = pytree.tree_map_only(Tensor, as_float64, list(given))
    leaves, spec = pytree.tree_flatten(arguments)
    real = [leaf.requires_grad_() for leaf in leaves if is_real(leaf)]
    if not real:
        return "", 0
    operator = operator_of(pattern, lambda: running(environment))

    def own(*moved: Tensor) -> Any:
        tensors = iter(moved)
        return operator(spec, *(next(tensors) if is_real(leaf) else leaf for leaf in leaves))

    def by_rule(*these: Any) -> Any:
        return operator(spec, *pytree.tree_leaves(list(these)))

    try:
        with torch.no_grad():
            own(*real)
    except Exception:  # the pattern itself does not run in float64
        return "", 0
    try:
        mine = gradients(by_rule)(*arguments)
    except Exception as error:  # whatever the user's backward raises
        return str(error) if isinstance(error, FuseError) else f"backward fails, {said(error)}", 0
    count, problem = _like_autograds(pattern, environment, arguments, by_rule, mine)
    if not problem and (differences or not count):
        problem = _like_differences(own, real)
    return problem, count


def _like_autograds(
    pattern: Pattern,
    environment: Environment,
    arguments: Sequence[Any],
    by_rule: Callable[..., Any],
    mine: Sequence[Tensor | None],
) -> tuple[int, str]:
    names = [
        parameter.name
        for parameter, argument in zip(pattern.parameters, arguments, strict=True)
        for leaf in pytree.tree_leaves(argument)
        if is_real(leaf)
    ]
    plain = gradients(within(pattern.function, environment))
    try:
        wanted = plain(*arguments)
    except Exception:  # autograd has none
        return 0, ""
    size = cache(partial(sizes_of, [plain, gradients(by_rule)], arguments, FLOAT64))
    count = 0
    for place, (name, have, want) in enumerate(zip(names, mine, wanted, strict=True)):
        if have is None and want is None:
            continue
        like = have if want is None else want
        assert like is not None
        zero = torch.zeros_like(like)
        own, wanted_one = (zero if one is None else one.contiguous() for one in (have, want))
        if problem := difference(f"gradient of {name}", own, wanted_one, None, numbered(size, place)):
            if have is None:
                return count, f"backward gives no gradient of {name}, and the pattern has one"
            if want is None:
                return count, f"backward gives a gradient of {name}, and the pattern has none"
            return count, f"backward: {problem}"
        count += have is not None and want is not None
    return count, ""


def _like_differences(own: Callable[..., Any], real: Sequence[Tensor]) -> str:
    """The fault that ``gradcheck`` finds, or ''."""
    fast = sum(leaf.numel() for leaf in real) > MOST_ELEMENTS
    try:
        torch.autograd.gradcheck(own, tuple(real), fast_mode=fast)
    except Exception as error:  # gradcheck, or the user's backward
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"backward: {(lines or ['gradcheck fails'])[0].rstrip(',')}"
    return ""
