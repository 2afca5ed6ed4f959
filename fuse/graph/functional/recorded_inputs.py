"""The inputs of a recorded call: a tensor from outside gets a fake tensor, and a placeholder when it is first read.

forward(x)                       placeholder x           argument
    F.linear(x, self.weight)     placeholder weight      parameter, named as in the model
    x + TABLE                    placeholder constant_2  constant: a tensor that is no part of the model
    torch.tensor([1, 2])         placeholder constant_3  constant: the program's own numbers
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from fuse.devices import HOST
from fuse.errors import CaptureError
from fuse.graph.functional.tensor_values import Functionalizer
from fuse.graph.naming import identifier
from fuse.graph.numbers.drawn_numbers import LARGEST_CHOICES
from fuse.graph.outputs import add_placeholder
from fuse.graph.signature import InputSpec, Reshaping
from fuse.graph.sources import user_line

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""Type of a number -> the dtype of the tensor that an operator makes of it."""


class RecordedInputs:
    """The inputs of one recording. ``names``: kind and name of each tensor of the model, by ``id``."""

    def __init__(
        self,
        graph: Graph,
        functional: Functionalizer,
        fake_mode: FakeTensorMode,
        names: Mapping[int, tuple[Any, str]],
    ) -> None:
        self.graph, self.functional, self.fake_mode, self.names = graph, functional, fake_mode, names
        self.specs: list[InputSpec] = []
        self.placeholders: list[Tensor] = []
        self.adopted: dict[int, tuple[Tensor, Tensor]] = {}  # real tensor -> its fake, both kept alive
        self.names_by_fake: dict[int, tuple[Any, str]] = {}
        self.data: dict[int, Tensor] = {}  # id of a fake tensor -> its real tensor
        self.versions: dict[int, int] = {}  # id of a fake tensor -> its version before the call
        self.gradients: dict[int, tuple[Tensor, Tensor, int]] = {}
        """``.grad`` before the call, by ``id`` of the fake tensor: the real one, the fake one, and its version."""
        self.without_gradient: dict[int, None] = {}  # ids of fake tensors whose .grad forward found to be None
        self.accumulates = False  # whether .grad of a real tensor became a fake tensor
        self.adopting = False  # torch reads what a tensor has, to make a fake one
        self.real_of: dict[Node, Tensor] = {}  # placeholder -> its real tensor
        self.fixed: set[Node] = set()  # placeholders of the program's own numbers
        self._last: Node | None = None

    def argument(self, name: str, index: int, leaf: Any) -> Any:
        """An argument of the call as ``forward`` gets it: a tensor as its fake tensor, which has a placeholder."""
        if not isinstance(leaf, Tensor):
            return leaf
        seen = id(leaf) in self.adopted
        fake = self.adopt(leaf)
        if not seen:
            self.add(fake, InputSpec("argument", name, index))
        return fake

    def adopt(self, tensor: Tensor) -> Tensor:
        """The fake tensor of a tensor from outside; the tensor itself if it is fake already."""
        if id(tensor) not in self.adopted:
            self.functional.draws.refuse_value(tensor)
            if isinstance(tensor, FakeTensor):
                fake: Tensor = tensor
            elif type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                raise CaptureError(f"an input is a {type(tensor).__name__}, a tensor subclass that is not supported")
            elif tensor.layout is not torch.strided:
                raise CaptureError(f"an input has layout {tensor.layout}, which is not supported")
            else:
                self.adopting = True
                try:
                    with contextlib.nullcontext() if tensor.is_leaf else _unwarned():
                        fake = self.fake_mode.from_tensor(tensor)
                    if fake.is_leaf and (gradient := fake.grad) is not None and tensor.grad is not None:
                        self.gradients[id(fake)] = tensor.grad, gradient, _version(gradient)
                finally:
                    self.adopting = False
            self.adopted[id(tensor)] = (tensor, fake)
            self.data[id(fake)] = tensor
            # torch writes a storage into some of its new fake tensors
            self.versions[id(fake)] = _version(fake)
        return self.adopted[id(tensor)][1]

    def add(self, fake: Tensor, spec: InputSpec, writes_back: bool = True) -> Node:
        """A new placeholder for ``fake``, behind the existing placeholders."""
        name = identifier(spec.name)
        self.functional.settle()
        if self._last is not None:
            with self.graph.inserting_after(self._last):
                node = add_placeholder(self.graph, name)
        elif len(self.graph.nodes):
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                node = add_placeholder(self.graph, name)
        else:
            node = add_placeholder(self.graph, name)
        node.meta["val"] = fake
        node.meta["source"] = ""
        self._last = node
        self.real_of[node] = self.data.get(id(fake), fake) if spec.value is None else spec.value
        self.functional.add_input(fake, node, len(self.specs) if writes_back else None)
        self.specs.append(spec)
        self.placeholders.append(fake)
        return node

    def known(self, tensor: Tensor) -> Tensor:
        """The fake tensor that the graph knows for an operand; a new operand gets a placeholder."""
        if not isinstance(tensor, FakeTensor):
            if tensor.layout is not torch.strided:
                _, name = self.names.get(id(tensor), ("", "a tensor"))
                raise CaptureError(f"{name} has layout {tensor.layout}, and is read at {user_line()}")
            tensor = self.adopt(tensor)
            kind, _ = self.names_by_fake.get(id(tensor), ("", ""))
            if kind == "attribute":  # not read through the attribute, which may have another value later
                raise CaptureError(f"an attribute that forward assigns is read at {user_line()}, but not by its name")
        if not self.functional.known(tensor):
            kind, name = self.names_by_fake.get(id(tensor), ("constant", ""))
            if kind == "constant":
                name = f"constant_{len(self.specs)}"
                real = next((r for r, f in self.adopted.values() if f is tensor), None)
                if real is None:
                    raise CaptureError(f"a tensor at {user_line()} was made outside of the call and cannot be followed")
                self.add(tensor, InputSpec("constant", name, value=real, may_change=True))
            else:
                self.add(tensor, InputSpec(kind, name))
        return tensor

    def operands(self, arguments: Any) -> Any:
        """``arguments`` with the fake tensors that the graph knows."""
        if isinstance(arguments, Tensor):
            return self.known(arguments)
        if type(arguments) in (tuple, list):
            return type(arguments)([self.operands(a) for a in arguments])
        if isinstance(arguments, dict):
            return {name: self.operands(a) for name, a in arguments.items()}
        return arguments

    def of_state(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor  # refused where an operator reads it
        fake = self.adopt(tensor)
        if id(tensor) in self.names:
            self.names_by_fake[id(fake)] = self.names[id(tensor)]
        return fake

    def of_attribute(self, tensor: Tensor, name: str) -> Tensor:
        fake = self.adopt(tensor)
        self.names_by_fake.setdefault(id(fake), ("attribute", name))
        return fake

    def is_fake_of(self, tensor: Tensor, real: Tensor) -> bool:
        return id(real) in self.adopted and self.adopted[id(real)][1] is tensor

    def note_gradient(self, tensor: Tensor, value: Tensor | None) -> None:
        """Note that ``forward`` reads ``.grad`` of a tensor that the caller holds, or assigns ``value`` to it.

        Raises:
            CaptureError: it does not find None, or does not leave it.
        """
        real = self.data.get(id(tensor)) if isinstance(tensor, FakeTensor) else tensor
        if real is None or self.adopting:
            return
        if value is None and real.is_leaf and _GRADIENT.__get__(real) is None:
            self.without_gradient[id(self.known(real))] = None
        else:
            self.refuse_gradient(tensor)

    def refuse_gradient(self, tensor: Tensor) -> None:
        """Refuse to read or change ``.grad`` of a tensor that the caller holds."""
        real = self.data.get(id(tensor)) if isinstance(tensor, FakeTensor) else tensor
        if real is not None and not self.adopting:
            _, name = self.names.get(id(real)) or self.names_by_fake.get(id(tensor), ("", "a tensor"))
            raise CaptureError(f"forward reads or changes .grad of {name} at {user_line()}; a graph cannot hold that")

    def ungraded(self) -> tuple[int, ...]:
        """The placeholders whose ``.grad`` ``forward`` found to be None."""
        return tuple(i for i, fake in enumerate(self.placeholders) if id(fake) in self.without_gradient)

    def put_back_gradients(self) -> None:
        """Give real tensors that were used themselves, by objects that hold them, the ``.grad`` that they had."""
        for real, fake in self.adopted.values():
            if real is not fake and real.is_leaf and isinstance(real.grad, FakeTensor):
                real.grad = self.gradients[id(fake)][0] if id(fake) in self.gradients else None
                self.accumulates = True

    def refuse_accumulated(self) -> None:
        """Refuse a call that left a gradient in ``.grad`` of a tensor that the caller holds."""
        for real, fake in self.adopted.values():
            if real is not fake and fake.is_leaf:
                _, before, version = self.gradients.get(id(fake), (None, None, 0))
                self.accumulates |= fake.grad is not before or (before is not None and _version(before) != version)
        if self.accumulates:
            raise CaptureError("forward leaves a gradient in .grad; a graph cannot hold that")

    def reassigned(self) -> tuple[int, ...]:
        """The placeholders whose tensors got other memory."""
        changed = self.functional.former.keys() - {id(fake) for fake, _, _ in self.functional.reshaped}
        return tuple(i for i, fake in enumerate(self.placeholders) if id(fake) in changed)

    def reshaped(self) -> tuple[Reshaping, ...]:
        """The changes of shapes of inputs."""
        positions = {id(fake): i for i, fake in enumerate(self.placeholders)}
        return tuple(Reshaping(positions[id(fake)], op, args) for fake, op, args in self.functional.reshaped)

    def raised(self) -> tuple[tuple[int, int], ...]:
        """The inputs whose versions ``forward`` raised, and how often, without changes of their shapes."""
        reshaped = [id(fake) for fake, _, _ in self.functional.reshaped]
        before = self.versions
        counted = [(i, one) for i, one in enumerate(self.placeholders) if _has_version(one)]
        times = ((i, one._version - before.get(id(one), 0) - reshaped.count(id(one))) for i, one in counted)
        return tuple((i, count) for i, count in times if count)

    def drawn(self, number: int | float, draw: int) -> Node:
        """A random number that Python draws as an input."""
        real = tensor_of(number)
        spec = InputSpec("draw", f"draw_{draw}", draw, value=real, may_change=True)
        return self.add(self.adopt(real), spec, writes_back=False)

    def choices(self) -> tuple[Tensor, Tensor]:
        """Choices by random numbers as an input: its fake tensor and its real one."""
        with _disable_current_modes():
            real = torch.zeros(LARGEST_CHOICES, dtype=torch.bool, device=HOST)
        fake = self.adopt(real)
        self.add(fake, InputSpec("draw", "choices", value=real, may_change=True), writes_back=False)
        return fake, real

    def constant(self, op: OpOverload, tensor: Tensor) -> Tensor:
        """The fake tensor of ``torch.tensor([...])`` in ``forward``: the program's own numbers, a new tensor in each
        call."""
        if isinstance(tensor, FakeTensor):
            raise CaptureError(f"a tensor is made from values that depend on data at {user_line()}")
        fake: Tensor = op(tensor)
        name = f"constant_{len(self.specs)}"
        with unset_fake_temporarily():  # the real numbers, not a fake tensor
            value = tensor.detach().clone()
        self.fixed.add(self.add(fake, InputSpec("constant", name, value=value), writes_back=False))
        return fake

    def number(self, number: complex) -> Tensor:
        """The tensor that an operator makes of a number where it expects a tensor."""
        with unset_fake_temporarily():
            value = torch.tensor(number, dtype=_DTYPES[type(number)])
        with self.fake_mode:
            return self.constant(torch.ops.aten.lift_fresh.default, value)


_GRADIENT: Any = Tensor.grad  # the slot itself, which is not patched during a recording


def _version(tensor: Tensor) -> int:
    """The version of a tensor; 0 if it has none."""
    return tensor._version if _has_version(tensor) else 0


def _has_version(tensor: Tensor) -> bool:
    """Whether autograd counts the writes to a tensor: not to those of inference mode, nor to others with their data."""
    try:
        return not tensor.is_inference() and tensor._version >= 0
    except RuntimeError:
        return False


def tensor_of(number: int | float) -> Tensor:
    """A real tensor of a number that is an input."""
    with _disable_current_modes():
        return torch.tensor(number, dtype=_DTYPES[type(number)], device=HOST)


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """A context without torch's warning about ``.grad`` of a tensor that is no leaf, which its fake modes read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        yield
