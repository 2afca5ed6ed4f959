"""Gradients by a pattern's own rule, the method ``backward``, checked against autograd's requirements.

    def backward(self, grad, x, weight): ...              a gradient, or None, for each parameter of ``pattern``
    def backward(self, grad, x, weight, *, result): ...   also gets the result of the pattern
    def backward(self, grad_y, grad_z, x): ...            one gradient for each result

As in ``torch.autograd.Function``, None means no gradient. A result that the loss does not use has a gradient of zeros;
a result that is not real has None. The code is plain PyTorch, recorded like a model's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuse.errors import CaptureError, FuseError
from fuse.graph.describing import dtype_and_shape
from fuse.rewrite.patterns.definition import Pattern


def gradients(
    pattern: Pattern, arguments: Sequence[Any], results: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of the tensors among ``arguments``, in order; ``tangents`` are the gradients of ``results``.

    Arguments are tensors, lists of tensors, and None for one that the pattern does not read. Must run in the
    environment of the pattern's constants.

    Raises:
        FuseError: ``backward`` returns the wrong number of gradients, a wrong shape or dtype, or writes to an argument.
    """
    backward = pattern.backward
    assert backward is not None
    takes = inspect.signature(backward).parameters
    named = {"result": results[0] if len(results) == 1 else tuple(results)} if "result" in takes else {}
    wanted = len(takes) - len(named) - len(arguments)
    if wanted != len(tangents):
        raise FuseError(f"backward takes the gradients of {wanted} results, and the pattern has {len(tangents)}")
    held = [one for one in pytree.tree_leaves((tangents, arguments, results)) if isinstance(one, Tensor)]
    versions = [one._version for one in held]
    answer = backward(*tangents, *arguments, **named)
    if versions != [one._version for one in held]:
        raise FuseError("backward writes to one of its arguments")
    given = answer if isinstance(answer, tuple) else (answer,)
    if len(given) != len(arguments):
        raise FuseError(f"backward gives {len(given)} gradients, and the pattern has {len(arguments)} parameters")
    found: list[Tensor | None] = []
    for parameter, argument, gradient in zip(pattern.parameters, arguments, given, strict=True):
        tensors = argument if isinstance(argument, list) else [argument]
        if gradient is None:
            parts: Sequence[Any] = [None] * len(tensors)
        elif isinstance(argument, list):
            parts = gradient if isinstance(gradient, (list, tuple)) else [gradient]
        else:
            parts = [gradient]
        if len(parts) != len(tensors):
            raise FuseError(f"backward gives {len(parts)} gradients for the {len(tensors)} tensors of {parameter.name}")
        for tensor, part in zip(tensors, parts, strict=True):
            if reason := _misfit(parameter.name, tensor, part):
                raise FuseError(reason)
            found.append(part)
    return found


def _misfit(name: str, tensor: Any, gradient: Any) -> str | None:
    if gradient is None:
        return None
    if not isinstance(gradient, Tensor):
        return f"backward gives a {type(gradient).__name__} for {name}"
    if not isinstance(tensor, Tensor) or not is_differentiable(tensor):
        return f"backward gives a gradient for {name}, which can have none"
    if (gradient.shape, gradient.dtype) != (tensor.shape, tensor.dtype):
        return f"backward gives {dtype_and_shape(gradient)} for {name}, which is {dtype_and_shape(tensor)}"
    return None


def is_differentiable(tensor: Tensor) -> bool:
    """Whether a tensor has a dtype with gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def results_of(pattern: Pattern, arguments: Sequence[Any]) -> list[Tensor]:
    """The results of the pattern for these arguments."""
    answer = pattern.function(*arguments)
    return list(answer) if isinstance(answer, (tuple, list)) else [answer]


def with_gradients(pattern: Pattern) -> Callable[..., Any]:
    """A function of the pattern's parameters that returns the results and the gradients that are not None.

    It raises ``CaptureError`` if :func:`gradients` raises.
    """

    @functools.wraps(pattern.function)
    def function(*arguments: Any) -> Any:
        results = results_of(pattern, arguments)
        tangents = [torch.empty_like(one) if is_differentiable(one) else None for one in results]
        try:
            found = gradients(pattern, arguments, results, tangents)
        except FuseError as error:
            raise CaptureError(str(error)) from error
        return tuple(gradient for gradient in found if gradient is not None)

    return function


def operator_of(pattern: Pattern, running: Callable[[], Any]) -> Callable[..., Any]:
    """The pattern as one function of autograd, whose gradient is ``backward``, run in the context ``running()``.

    Its arguments are the tree specification of the pattern's arguments, then the tensors among these.
    """

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, spec: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
            with running():
                results = [one.clone() for one in results_of(pattern, pytree.tree_unflatten(tensors, spec))]
            ctx.mark_non_differentiable(*(one for one in results if not is_differentiable(one)))
            ctx.save_for_backward(*tensors, *results)
            ctx.spec = spec
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
            count = len(ctx.saved_tensors) - len(tangents)
            tensors, results = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
            given = [g if is_differentiable(one) else None for g, one in zip(tangents, results, strict=True)]
            with running():
                return None, *gradients(pattern, pytree.tree_unflatten(tensors, ctx.spec), results, given)

    return Operator.apply
