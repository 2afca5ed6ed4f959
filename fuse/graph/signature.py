"""Signature of a captured graph: the sources of its inputs, the uses of its outputs, and its writes to inputs.

A captured graph is a pure function of its placeholders. Everything that eager did besides computing values (mutating
an input, returning a view of one, returning the same tensor twice, plain Python values in the output) is written down
here, and the runtime plays it back.

    placeholders  ->  graph  ->  values  ->  outputs (values, views, inputs themselves, Python objects)
                                         ->  mutations (values copied back into inputs)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.utils._pytree import TreeSpec

from fuse.graph.learned import Learning


@dataclass(frozen=True)
class InputSpec:
    """Where one placeholder's tensor comes from.

    ``argument``: the flattened call arguments, at position ``index``. ``parameter`` and ``buffer``: looked up by
    ``name`` (qualified, as in ``state_dict``). ``attribute``: the flattened values that the attributes in ``kept`` that
    are read have before the call, at position ``index``. ``constant``: held in ``value``; a tensor made in
    ``forward`` from Python numbers, or one that the model holds without having registered it, whose numbers
    ``may_change`` between calls. A constant that was computed from nothing but numbers has the graph of it as its
    ``origin``.
    """

    kind: Literal["argument", "parameter", "buffer", "attribute", "constant"]
    name: str
    index: int = -1
    value: torch.Tensor | None = field(default=None, compare=False)
    may_change: bool = field(default=False, repr=False)
    origin: GraphModule | None = field(default=None, compare=False, repr=False)


def held_tensor(spec: InputSpec, model: nn.Module) -> Tensor:
    """The parameter, buffer or constant that a placeholder stands for.

    >>> held_tensor(InputSpec("parameter", "0.bias"), nn.Sequential(nn.Linear(2, 3))).shape
    torch.Size([3])
    """
    if spec.value is not None:
        return spec.value
    owner, _, name = spec.name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), name)
    return found


@dataclass(frozen=True)
class Layout:
    """Size, stride and offset in elements of a view on a named tensor.

    Size and stride are what ``torch.as_strided`` takes; ``offset`` is counted from the named tensor's own first
    element, so that it holds wherever in its storage that tensor lies.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class OutputSpec:
    """The kind of one leaf of the model's result.

    ``graph``: value ``index`` of the graph's flat outputs; ``input``: placeholder ``index`` itself (the very same
    tensor); ``repeat``: leaf ``index`` of the result once more (the very same object); ``number``: the Python number in
    leaf ``index``; ``python``: the plain object ``value``. With ``view`` the leaf is a new tensor with that layout on
    the memory of the named one, so that aliases between outputs, and between outputs and inputs, are eager's.
    """

    kind: Literal["graph", "input", "repeat", "number", "python"]
    index: int = -1
    view: Layout | None = None
    value: object = None


@dataclass(frozen=True)
class Mutation:
    """After the call, graph output ``value_index`` is copied into placeholder ``input_index``."""

    input_index: int
    value_index: int


@dataclass(frozen=True)
class Attribute:
    """An attribute ``name``, or a buffer of that name, of the submodule with the qualified name ``owner``.

    ``entries``: not the attribute itself, but what the dictionary holds that it is.
    """

    owner: str
    name: str
    entries: bool = False

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}".strip(".")


@dataclass(frozen=True)
class MutatedAttribute:
    """An attribute that ``forward`` assigns, in this call or in others.

    Where it is ``read``, its value before the call decides, by structure, layout and plain values, whether the graph
    serves the call. Where it is ``assigned``, the result's leaves end with its new value. A ``counted`` one is an
    ``int`` that is only added to.
    """

    attribute: Attribute
    read: bool
    assigned: bool
    counted: bool


@dataclass(frozen=True)
class Advance:
    """In the place of a new value: attribute ``which`` in ``kept``, as it was before the call, plus ``delta``."""

    which: int
    delta: int


class Dispatch(NamedTuple):
    """One operator that eager dispatched, in order, as recorded before any rewriting (views included)."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    source: str


@dataclass(frozen=True)
class Signature:
    """The promise of one captured graph; found in ``graph.meta["signature"]``.

    With ``kept`` attributes, ``outputs`` and ``out_spec`` are of the pair (result, values to assign in their order).
    With ``learning`` they are of the pair (values that tell what was learned, all that). Where ``eagers`` is false,
    eager dispatches other operators than ``dispatches``, which depend on values (packed sequences). ``context``: the
    context variables that ``forward`` may read, and their values.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    out_spec: TreeSpec
    mutations: tuple[Mutation, ...]
    dispatches: tuple[Dispatch, ...]
    kept: tuple[MutatedAttribute, ...] = ()
    learning: Learning | None = None
    eagers: bool = True
    context: tuple[tuple[ContextVar[Any], Any], ...] = ()
