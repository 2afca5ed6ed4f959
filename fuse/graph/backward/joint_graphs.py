"""The two graphs of a call with gradients, and a call before its gradients are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule

from fuse.graph.backward.backward_graph import BackwardInput
from fuse.graph.functional.aliases import View


@dataclass(frozen=True)
class Joint:
    """The forward graph and the backward graph of a call.

    ``forward``: the graph of :func:`fuse.graph.capture.capture`, with the saved tensors at the end of its output.
    ``backward``: None if no result needs gradients. ``given``: the meaning of its placeholders, in order.
    ``gradients``: for each placeholder of ``forward``, the position of its gradient in the output of ``backward``; None
    if it has no gradient. ``requires_grad``: the leaves of the result that need gradients. ``rolled``: gradients were
    taken loop by loop instead of step by step. ``own_gradients``: the call contains a ``torch.autograd.Function``.
    ``eagers``: the reason why operators alone do not determine the gradients, or None. ``later``: the results whose
    gradients flow through other results, as :func:`fuse.graph.backward.later_results.later_results` gives them.
    """

    forward: GraphModule
    backward: GraphModule | None = None
    given: tuple[BackwardInput, ...] = ()
    gradients: tuple[int | None, ...] = ()
    requires_grad: frozenset[int] = frozenset()
    rolled: bool = False
    own_gradients: bool = False
    eagers: str | None = None
    later: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorded:
    """A call recorded under autograd, before its gradients are taken.

    ``meta["needs_gradient"]`` of a node: whether its tensor required gradients at the end of the call. ``views``: for
    each leaf of the result, the views that lead to it from the graph's value. ``requires_grad`` is as in
    :class:`Joint`. ``eagers``: the reason why gradients must be taken step by step, as eager takes them, or None.
    """

    forward: GraphModule
    views: tuple[tuple[View, ...], ...]
    requires_grad: frozenset[int]
    eagers: str | None = None


Differentiate = Callable[[Recorded], Joint | None]
"""Takes the gradients of a call by another method; None if it cannot."""
