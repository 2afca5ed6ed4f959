"""Try a pattern before it is used: as a whole when it first matches, and on each class of calls that a model has.

    first match anywhere         sizes, constants, NaN and infinities, near misses, gradients      refused, or not
    first match in a class       a few calls of that class (dtypes, ranks, broadcast, layout,      right, raised, wrong
                                 numbers), and their gradients where the pattern has a rule

Verdicts are kept on disk by the pattern's code (:mod:`fuse.rewrite.patterns.pattern_cache`), so that nothing is tried
twice for the same code. A class takes 2 to 70 ms, a whole pattern 0.1 to 3 s.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.check.gradients import wrong_gradient
from fuse.check.judging import judged_call, quiet, runs
from fuse.check.pattern import verify
from fuse.check.samples import LARGEST, values
from fuse.devices import without_autocast
from fuse.graph.describing import dtype_and_shape
from fuse.rewrite.patterns import pattern_cache
from fuse.rewrite.patterns.call_classes import RIGHT, Trial, class_of, layout_of
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.exact_match import FoundMatch
from fuse.rewrite.patterns.language import Environment

_SIZES = ((5, 3, 7, 2, 11, 4), (6, 13, 4, 9, 3, 8))
_SPECIAL = (math.nan, math.inf, -math.inf)
_VERIFIED = "verified"
_NOT_TRIED = Trial("not tried", "the pattern runs on no smaller tensors of this class")

MAX_NUMBERS = 64
"""The most classes tried that differ in the pattern's numbers alone: each step of a loop may have its own number."""

_known: dict[tuple[Pattern, str, str], Trial] = {}
_numbers: dict[tuple[Pattern, str, str], set[str]] = {}


@cache
def refusal(pattern: Pattern) -> str | None:
    """The reason why ``pattern`` must not be used, or None: the result of a quick trial, new or cached.

    Only a pattern with ``replace`` or ``backward`` can be wrong.
    """
    if pattern.replace is None and pattern.backward is None:
        return None
    if content := pattern_cache.find(pattern, "refusal"):
        said = content.decode()
    else:
        with _by_itself():
            wrong = verify(pattern, quick=True).counterexample
        said = _VERIFIED if wrong is None else f"refused: {wrong}"
        pattern_cache.store(said.encode(), pattern, "refusal")
    return None if said == _VERIFIED else said


def trial(found: FoundMatch) -> Trial:
    """The verdict, new or cached, on the pattern of the match ``found`` for calls of its class."""
    return _known_or(found, "class", tried)


def gradient_trial(found: FoundMatch) -> Trial:
    """The verdict on the gradients by the pattern's rule, for calls of the class of ``found``."""
    return _known_or(found, "gradients", gradients_tried)


def _known_or(found: FoundMatch, asked: str, find: Callable[[Pattern, Sequence[Any], Environment], Trial]) -> Trial:
    form, arguments = found.form, found.setting.arguments
    call_class = class_of(arguments, form.choices, found.constants)
    key = form.pattern, asked, call_class
    if key in _known:
        return _known[key]
    alike = _numbers.setdefault((form.pattern, asked, class_of(arguments, form.choices)), set())
    if call_class not in alike and len(alike) >= MAX_NUMBERS:
        return Trial("not tried", f"{MAX_NUMBERS} calls that differ in numbers alone were tried")
    alike.add(call_class)
    if content := pattern_cache.find(form.pattern, asked, call_class):
        one = Trial(**json.loads(content))
    else:
        with _by_itself():
            one = find(form.pattern, arguments, Environment(found.constants, form.choices))
        pattern_cache.store(
            json.dumps({"outcome": one.outcome, "reason": one.reason}).encode(), form.pattern, asked, call_class
        )
    _known[key] = one
    return one


def gradients_tried(pattern: Pattern, arguments: Sequence[Any], environment: Environment) -> Trial:
    """The verdict on the gradients for calls like ``arguments`` (tensors without data), and for other sizes."""
    for sizes in (*_smaller(arguments), {}):
        if not sizes and _elements(arguments) > LARGEST:
            break
        for most in (4, 2, 1):
            given = _made(arguments, sizes, None, most)
            if runs(pattern, given, environment):
                wrong, _ = wrong_gradient(pattern, given, environment, differences=False)
                return _with_call(Trial("wrong", wrong), given, None) if wrong else RIGHT
    return _NOT_TRIED


@contextmanager
def _by_itself() -> Iterator[None]:
    """Isolate a trial: kept verdicts must not depend on the model's modes, nor its random draws on the trial."""
    apart = (torch.inference_mode(False), torch.enable_grad(), without_autocast())
    with quiet(), torch.random.fork_rng(devices=[]), apart[0], apart[1], apart[2]:
        yield


def tried(pattern: Pattern, arguments: Sequence[Any], environment: Environment) -> Trial:
    """The verdict on calls like ``arguments`` (tensors without data), with other sizes, NaN and infinities."""
    ran = False
    raised: Trial | None = None
    for sizes in (*_smaller(arguments), None):
        if sizes is None and (ran or _elements(arguments) > LARGEST):
            break  # otherwise, a pattern that requires certain sizes is tried with those of the call
        for special in (None, *(() if pattern.finite else _SPECIAL)):
            for most in (4, 2, 1):  # integers are often indices into other tensors
                given = _made(arguments, sizes or {}, special, most)
                if (one := judged_call(pattern, given, environment)) is not None:
                    break
            if one is None or (one.outcome == "raised" and sizes is not None):
                raised = raised if one is None else _with_call(one, given, special)
                break
            ran = True
            if one.outcome != "right":
                return _with_call(one, given, special)
    return RIGHT if ran else raised or _NOT_TRIED


def _with_call(one: Trial, given: Sequence[Any], special: float | None) -> Trial:
    about = "" if special is None else f" with one {special:g}; finite=True allows this"
    return Trial(one.outcome, f"{one.reason} ({', '.join(map(_described, given))}{about})")


def _smaller(arguments: Sequence[Any]) -> Iterator[dict[int, int]]:
    """Maps of the sizes of ``arguments`` to small ones; equal sizes stay equal."""
    tensors = [one for one in pytree.tree_leaves(list(arguments)) if isinstance(one, Tensor)]
    distinct = list(dict.fromkeys(int(size) for one in tensors for size in one.shape if int(size) > 1))
    for small in _SIZES:
        endless = itertools.chain(small, itertools.count(max(small) + 1))
        yield dict(zip(distinct, endless, strict=False))


def _made(arguments: Sequence[Any], sizes: dict[int, int], special: float | None, most: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = pytree.tree_map_only(
        Tensor, lambda one: _like(one, sizes, special, most, generator), list(arguments)
    )
    return made


def _like(
    tensor: Tensor, sizes: dict[int, int], special: float | None, most: int, generator: torch.Generator
) -> Tensor:
    """A tensor with data, of the same class as ``tensor``."""
    shape = tuple(sizes.get(int(size), int(size)) for size in tensor.shape)
    made = values(shape, tensor.dtype, generator, most)
    if special is not None and made.numel() and made.is_floating_point():
        made.view(-1)[made.numel() // 2] = special
    layout = layout_of(tensor)
    if layout == "contiguous":
        return made
    if layout == "expanded":
        repeated = [size > 1 and int(step) == 0 for size, step in zip(shape, tensor.stride(), strict=True)]
        return made[tuple(slice(0, 1) if again else slice(None) for again in repeated)].expand(shape)
    strides = tensor.stride()
    order = sorted(range(len(shape)), key=lambda dim: -int(strides[dim]))
    back = [order.index(dim) for dim in range(len(order))]
    turned = made.permute(order)
    if layout == "strided":
        wide = torch.zeros((*turned.shape[:-1], 2 * turned.shape[-1] + 1), dtype=made.dtype)
        wide[..., 1::2] = turned
        return wide[..., 1::2].permute(back)
    return turned.contiguous().permute(back)


def _elements(arguments: Sequence[Any]) -> int:
    tensors = [one for one in pytree.tree_leaves(list(arguments)) if isinstance(one, Tensor)]
    return sum(math.prod(int(size) for size in one.shape) for one in tensors)


def _described(argument: Any) -> str:
    if isinstance(argument, list):
        return f"[{', '.join(map(_described, argument))}]"
    return "none" if argument is None else dtype_and_shape(argument)
