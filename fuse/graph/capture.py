"""Capture a call: run the model once on fake tensors and record the operators that it dispatches.

    model, args  ->  recorded operators (what eager launches)  ->  functional graph + signature

A dispatch mode below autograd sees every operator that eager would launch, after composite operators are decomposed.
Fake tensors have shapes, strides and dtypes but no data, so nothing is allocated. A value that ``forward`` reads is
computed from the inputs, and what Python learns becomes a result of the graph (:mod:`fuse.graph.values.value_reads`).
The graph is a pure function of its placeholders; :mod:`fuse.graph.signature` describes everything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule

from fuse.errors import CaptureError
from fuse.graph.fakes.fake_mode import FakeMode
from fuse.graph.fakes.fake_operators import unlogged
from fuse.graph.garbage_collection import without_garbage_collection
from fuse.graph.locks import ForkedLock
from fuse.graph.patches.uncompiled import uncompiled
from fuse.graph.recording.recorder import Recorder
from fuse.graph.recording.recording_plan import Plan, settled
from fuse.graph.signature import Attribute
from fuse.graph.structure.arguments import flatten_arguments


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    mutated: Sequence[Attribute] = (),
    converts: bool = False,
) -> GraphModule:
    """One functional ATen graph of ``model(*args, **kwargs)``.

    The arguments may be real tensors, fake tensors, or any Python values; they are neither changed nor kept. The graph
    is what ``torch.no_grad()`` would run, without gradients. ``mutated``: attributes that other calls are known to
    assign; those that this call assigns are found. ``converts``: integers that ``int`` makes of tensors are known to
    differ from call to call.

    Raises:
        CaptureError: the call depends on data, or does something that a graph cannot represent; the message names the
            user's line.

    >>> graph = capture(nn.Linear(3, 2), (torch.zeros(4, 3),))
    >>> [str(node.target) for node in graph.graph.nodes]
    ['input_1', 'weight', 'bias', 'aten.t.default', 'aten.addmm.default', 'output']
    >>> graph.meta["signature"].inputs[1]
    InputSpec(kind='parameter', name='weight', index=-1, value=None)
    """

    return _captured(model, args, kwargs or {}, mutated, converts, shorten=False)


def capture_short(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mutated: Sequence[Attribute] = (),
    converts: bool = False,
) -> GraphModule:
    """As :func:`capture`, for passes that roll loops: most steps of long loops may be left out of the graph
    (:mod:`fuse.graph.functional.short_graphs`)."""
    return _captured(model, args, kwargs, mutated, converts, shorten=True)


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mutated: Sequence[Attribute],
    converts: bool,
    shorten: bool,
) -> GraphModule:
    def record(plan: Plan) -> GraphModule:
        with prepared(model, args, kwargs) as fake_mode:
            recorder = Recorder(model, fake_mode, plan, shorten=shorten)
            return recorder.short(recorder.run(args, dict(kwargs)))

    return settled(record, mutated, converts)


@contextlib.contextmanager
def prepared(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[FakeTensorMode]:
    """The fake mode for a capture, with torch in the modes in which calls are captured."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            name = module.original_name
            raise CaptureError(f"{name} is a ScriptModule, whose code is not Python; use the module it was made from")
    # Fake tensors are mutated for calls of equal layouts, which inference tensors cannot be.
    with (
        _CAPTURING,
        torch.inference_mode(False),
        _fake_mode(model, args, kwargs) as fake_mode,
        without_garbage_collection(),
        unlogged(),
        uncompiled(),
    ):
        yield fake_mode


_CAPTURING = ForkedLock()
"""Held by the capturing thread, because parts of torch are replaced during a capture."""


@contextlib.contextmanager
def _fake_mode(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[FakeTensorMode]:
    """The fake mode of the tensors that are fake already; otherwise a new one."""
    tensors = [*flatten_arguments(args, kwargs)[0], *model.parameters(), *model.buffers()]
    modes = {id(t.fake_mode): t.fake_mode for t in tensors if isinstance(t, FakeTensor)}
    if len(modes) > 1:
        raise CaptureError("the model and its arguments belong to different fake tensor modes")
    yield next(iter(modes.values()), None) or FakeMode(allow_non_fake_inputs=True)
