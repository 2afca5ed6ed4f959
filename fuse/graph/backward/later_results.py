"""Find the results of a call whose gradients flow through other results.

    h = tanh(x w);  y = h v;  return y, h        y is later than h: eager gives a hook on h the gradient of y, too

For a compiled call, autograd sees one function that gives y and h at once, so that such a hook gets h's own part only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fuse.graph.state.saved_by_autograd import autograd_nodes


def later_results(leaves: Sequence[Any], positions: Sequence[int]) -> dict[int, int]:
    """The results among ``positions`` from which others are computed, each with those others as bits of a number.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> h = x.exp()
    >>> later_results([h * 2, h, h.detach() * x, 3], [0, 1, 2])
    {1: 1}
    """
    if len(positions) < 2:
        return {}
    with _disable_current_modes():
        return _later({i: leaves[i] for i in positions})


def _later(results: dict[int, Tensor]) -> dict[int, int]:
    places = {i: (result.grad_fn, result.output_nr) for i, result in results.items()}
    nodes = list(autograd_nodes(results.values()))
    readers = Counter(following for node in nodes for following, _ in node.next_functions)
    of_node: Counter[Any] = Counter()  # the results that are computed from the results of a node
    of_place: Counter[Any] = Counter()
    for i, (node, _) in places.items():
        of_node[node] |= 1 << i
    ready = [node for node in nodes if not readers[node]]
    while ready:
        node = ready.pop()
        for following, number in node.next_functions:
            if following is None:
                continue
            of_node[following] |= of_node[node]
            of_place[following, number] |= of_node[node]
            readers[following] -= 1
            if not readers[following]:
                ready.append(following)
    return {i: found for i, place in places.items() if (found := of_place[place])}
