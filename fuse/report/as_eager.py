"""Launches of a call that cannot be captured: a copy runs eager while its operators are recorded.

    model, args  ->  copies  ->  eager, under a mode that records  ->  operators of forward (and backward)

Such a call runs eager under ``fuse.compile`` too. Submodules may run fused there (:mod:`fuse.runtime.parts`), but count
as eager here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fuse import ops
from fuse.check.inputs import CheckCall, copied
from fuse.graph.signature import Dispatch, Signature
from fuse.graph.sources import user_line


def graphs_of_eager(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool
) -> tuple[GraphModule, GraphModule | None]:
    """Empty graphs whose signatures hold eager's dispatches: forward and, in training, backward.

    >>> forward, _ = graphs_of_eager(nn.Tanh(), (torch.ones(2),), {}, train=False)
    >>> [str(one.op) for one in forward.meta["signature"].dispatches]
    ['aten.tanh.default']
    """
    call = copied(CheckCall(model, args, dict(kwargs)))
    recording, backward = EagerRecording(user_line), EagerRecording(lambda: "")
    with torch.random.fork_rng(devices=[]):
        with torch.set_grad_enabled(train), recording:
            result = call.run()
        leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not train:
            return _without_nodes(recording.dispatches), None
        tangents = [torch.ones_like(leaf) for leaf in leaves]
        with backward:
            torch.autograd.backward(leaves, tangents)
    return _without_nodes(recording.dispatches), _without_nodes(backward.dispatches) if leaves else None


def has_data(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether all tensors of a call are real, so that it can run.

    >>> has_data(nn.Linear(2, 2, device="meta"), (), {})
    False
    """
    tensors = [*pytree.tree_leaves((args, dict(kwargs))), *model.parameters(), *model.buffers()]
    return not any(isinstance(t, Tensor) and (isinstance(t, FakeTensor) or t.is_meta) for t in tensors)


class EagerRecording(TorchDispatchMode):
    """Records eager's operators with fake copies of their tensors, which hold no memory."""

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.line = line
        self.dispatches: list[Dispatch] = []
        self._twins = FakeTensorMode()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if ops.is_composite(func):
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        given, named = self._twin(args), self._twin(kwargs)
        result = func(*args, **kwargs)
        self.dispatches.append(Dispatch(func, given, named, self._twin(result), self.line()))
        return result

    def _twin(self, values: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: self._twins.from_tensor(tensor.detach()), values)


def _without_nodes(dispatches: list[Dispatch]) -> GraphModule:
    graph = Graph()
    graph.output(()).meta.update(val=(), source="")
    module = GraphModule(nn.Module(), graph)
    module.meta["signature"] = Signature((), (), pytree.tree_structure(()), (), tuple(dispatches))
    return module
