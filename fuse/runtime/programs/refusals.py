"""Refusals: calls, models and graphs that always run eager, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx import GraphModule
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fuse.devices import has_kernels
from fuse.graph.state.object_contents import base_of, memory_kinds
from fuse.runtime.programs.steps import Fallback

is_traced: Callable[[], object] = torch._C._get_tracing_state
"""Whether ``torch.jit.trace`` records this thread's operators."""
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Number of active dispatch modes."""
anomalies_sought: Callable[[], bool] = torch.is_anomaly_enabled
ANOMALIES = Fallback("", "", "torch.autograd.detect_anomaly is on, which names the operator whose gradient is NaN")
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def refused_call(leaves: Sequence[Any]) -> Fallback | None:
    """The reason why a call with these leaves always runs eager, or None."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if type(leaf) not in _PLAIN_TENSORS:
                return Fallback("", "", f"an input is a {type(leaf).__name__}, a tensor subclass")
            if leaf._is_zerotensor():
                return Fallback("", "", "an input is a zero tensor without memory")
            if leaf.layout is not torch.strided:
                return Fallback("", "", f"an input has the layout {leaf.layout}")
        elif isinstance(leaf, memory_kinds()) and base_of(leaf) is object:
            reason = f"an argument is a {type(leaf).__name__} of objects, or too large to be compared in each call"
            return Fallback("", "", f"{reason}: pass a tensor (torch.from_numpy)")
    if torch._C._functorch.peek_interpreter_stack() is not None:  # of the inputs, or of weights (functional_call)
        return Fallback("", "", "the call is being transformed by torch.func")
    if forward_ad._current_level >= 0:
        return Fallback("", "", "gradients are taken in forward mode")
    if torch.is_inference_mode_enabled() and torch.is_grad_enabled():
        return Fallback("", "", "gradients are on in inference mode, where autograd records nothing")
    if anomalies_sought() and torch.is_grad_enabled():
        return ANOMALIES
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return Fallback("", "", "hooks on saved tensors are active")
    return None


def active_modes() -> Fallback | None:
    """The reason why a call runs eager within the modes of ``torch.overrides`` and of ``torch.utils._python_dispatch``
    that are active, or None. Such modes count, log or change the operators of eager."""
    functions = [mode for mode in _get_current_function_mode_stack() if not _is_recorded(mode)]
    dispatches = _get_current_dispatch_mode_stack()
    if any(isinstance(mode, FakeTensorMode) for mode in dispatches):  # a capture, or a call with tensors without data
        return None
    names = ", ".join(dict.fromkeys(type(mode).__name__ for mode in (*functions, *dispatches)))
    return Fallback("", "", f"a mode that has to see each operator is active ({names})") if names else None


def _is_recorded(mode: object) -> bool:
    """Whether a capture follows this mode: a default device, or a mode of fuse, such as one that narrows dtypes."""
    return isinstance(mode, DeviceContext) or type(mode).__module__.startswith("fuse.")


def refused_model(model: nn.Module, tensors: Iterable[Tensor]) -> Fallback | None:
    """The reason why all calls of a model with these tensors run eager, or None."""
    name = str(model._get_name())
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors):
        return Fallback(name, "", "the call initializes lazy parameters")
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        reason = "DistributedDataParallel communicates in forward: wrap the compiled model in it instead"
        return Fallback(name, "", reason)
    return None


def without_kernels(graph: GraphModule) -> str | None:
    """The reason why a graph's devices have no kernels, or None.

    Operators there whose results nobody reads are removed: PyTorch asks the device ``meta`` for layouts when it takes
    gradients in forward mode.
    """
    reason = without_kernels_for(node.meta.get("val") for node in graph.graph.nodes)
    if reason is None:
        return None
    for node in reversed(graph.graph.nodes):
        if node.op == "call_function" and not node.users and without_kernels_for([node.meta.get("val")]) is not None:
            graph.graph.erase_node(node)
    return without_kernels_for(node.meta.get("val") for node in graph.graph.nodes)


def without_kernels_for(values: Iterable[Any]) -> str | None:
    """The reason why the devices of these tensors have no kernels, or None.

    >>> without_kernels_for([torch.zeros(1), None]), without_kernels_for([torch.zeros(1, device="meta")])
    (None, 'there are no kernels for meta yet')
    """
    without = sorted({value.device.type for value in values if isinstance(value, Tensor) and not has_kernels(value)})
    return f"there are no kernels for {', '.join(without)} yet" if without else None
