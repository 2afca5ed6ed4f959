"""The signature of a captured graph: the sources of its inputs, the uses of its outputs, and its writes to inputs.

A captured graph is a pure function of its placeholders. The signature describes everything that eager does besides
computing values: mutating an input, returning a view of one, returning the same tensor twice, returning plain Python
values. The runtime repeats it in each call.

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

from fuse.graph.numbers.drawn_numbers import Drawn
from fuse.graph.numbers.learned import Learning


@dataclass(frozen=True)
class InputSpec:
    """The source of one placeholder's tensor.

    ``argument``: leaf ``index`` of the flattened call arguments. ``parameter`` and ``buffer``: the tensor called
    ``name`` (qualified, as in ``state_dict``). ``attribute``: leaf ``index`` of the flattened values that the
    ``mutated`` attributes which are read have before the call. ``draw``: the random number ``index`` that Python draws
    (``value`` in the captured call); with ``index`` -1, the tensor of choices that are data. ``constant``: ``value``,
    a tensor made in ``forward`` from Python numbers, or an unregistered tensor of the model, whose numbers
    ``may_change`` between calls. ``origin``: the graph of a constant that was computed from numbers alone.
    """

    kind: Literal["argument", "parameter", "buffer", "attribute", "draw", "constant"]
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
    """The source of one leaf of the model's result.

    ``graph``: value ``index`` of the graph's flat outputs; ``input``: placeholder ``index`` itself (the very same
    tensor); ``repeat``: leaf ``index`` of the result once more (the very same object); ``number``: the Python number in
    leaf ``index``; ``container``: the caller's own container ``index`` (counted from the end); ``python``: the plain
    object ``value``. With a ``view``, the leaf is a new tensor with that layout on the memory of that tensor, so that
    outputs and inputs share memory as in eager mode. ``freed``: it needs gradients, and its gradients raise
    (:mod:`fuse.graph.state.freed_graphs`). ``detached``: it needs none, although it is a view of an input that does.
    ``parameter``: the leaf is a new ``nn.Parameter`` on that memory, with this ``requires_grad``.
    """

    kind: Literal["graph", "input", "repeat", "number", "container", "python"]
    index: int = -1
    view: Layout | None = None
    value: object = None
    freed: bool = False
    detached: bool = False
    parameter: bool | None = None


@dataclass(frozen=True)
class ChangedContainers:
    """The containers among the arguments (:func:`fuse.graph.structure.arguments.containers_of`) that a call changes.

    ``changed``: their numbers; their new contents are at the end of the result's leaves. ``held``: the ``id`` of each
    list and dictionary that the model and its code hold; the call's containers must be others.
    """

    changed: tuple[int, ...]
    held: frozenset[int] = field(default=frozenset(), compare=False, repr=False)


@dataclass(frozen=True)
class Mutation:
    """After the call, graph output ``value_index`` is copied into placeholder ``input_index``."""

    input_index: int
    value_index: int


@dataclass(frozen=True)
class Reshaping:
    """After the call, ``op(tensor, *args)`` changes the shape of the tensor of placeholder ``input_index`` in place."""

    input_index: int
    op: OpOverload
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Attribute:
    """The attribute or buffer ``name`` of the submodule with the qualified name ``owner``.

    ``entries``: not the attribute itself, but the contents of the dictionary in it.
    """

    owner: str
    name: str
    entries: bool = False

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}".strip(".")


@dataclass(frozen=True)
class MutatedAttribute:
    """An attribute that ``forward`` assigns, in this call or in others.

    ``read``: the graph serves only calls in which its value has the same structure, layouts and plain values.
    ``assigned``: its new value is at the end of the result's leaves. ``counted``: it is an ``int`` that is only added
    to. ``number``: it is a number, which the graph reads as a tensor without dimensions.
    """

    attribute: Attribute
    read: bool
    assigned: bool
    counted: bool
    number: bool = False


@dataclass(frozen=True)
class Advance:
    """A new value of a count: attribute number ``which`` in ``mutated``, as before the call, plus ``delta``."""

    which: int
    delta: int


class Dispatch(NamedTuple):
    """One operator that eager dispatched, views included, as recorded before any rewriting."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    source: str


@dataclass(frozen=True)
class Signature:
    """The signature of one captured graph, in ``graph.meta["signature"]``.

    With ``mutated`` attributes, ``containers`` or ``reassigned`` placeholders, ``outputs`` and ``out_spec`` describe
    (result, values to assign, new contents, new data). With ``learning``, they describe the pair (confirming values,
    all that). ``eagers``: whether ``dispatches`` are eager's; for packed sequences, eager's depend on values.
    ``context``: the context variables that ``forward`` may read, with their values. ``inference``: whether ``forward``
    runs all operators in an inference mode of its own. ``containers``: those of the arguments that the call changes or
    returns. ``drawn``: the random numbers that Python draws. ``reassigned``: the placeholders whose tensors get other
    memory, as by ``tensor.data = value``. ``reshaped``: changes of shapes of inputs, in order. ``raised``: pairs of a
    placeholder and how often eager raises the version of its tensor otherwise. Autograd sees writes by versions; writes
    through ``.data`` raise none. ``ungraded``: the placeholders whose ``.grad`` ``forward`` found to be None.
    ``watched``: what a watch of the user's code found (:mod:`fuse.graph.recording.watched_code`).
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    out_spec: TreeSpec
    mutations: tuple[Mutation, ...]
    dispatches: tuple[Dispatch, ...]
    mutated: tuple[MutatedAttribute, ...] = ()
    learning: Learning | None = None
    eagers: bool = True
    context: tuple[tuple[ContextVar[Any], Any], ...] = ()
    inference: bool = False
    containers: ChangedContainers | None = None
    drawn: Drawn | None = None
    reassigned: tuple[int, ...] = ()
    reshaped: tuple[Reshaping, ...] = ()
    raised: tuple[tuple[int, int], ...] = ()
    ungraded: tuple[int, ...] = ()
    watched: Any = field(default=None, compare=False, repr=False)
