"""Attributes that ``forward`` assigns: their old values become inputs of the graph, their new values results.

    def forward(self, x):                            x, h  ->  tanh(x + h)  ->  result
        self.h = torch.tanh(x + self.h)                                     ->  the next h
        self.steps += 1                              steps + 1, after the call, by the runtime
        return self.h

The first run of ``forward`` shows which attributes it assigns (:mod:`fuse.graph.state.attributes`). The call is then
recorded again with an :class:`Overlay` over these attributes. The capturing thread sees fake tensors there, and the
model itself does not change. A number that is only incremented is a :class:`CountedInt`, so that the graph does not
depend on the number of calls. A number that is used otherwise (compared, multiplied, a bound of a slice) is read as if
from a tensor (:mod:`fuse.graph.numbers.read_numbers`). If the graph would learn the number itself, it becomes a
constant of the graph.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuse.errors import CaptureError
from fuse.graph.numbers.read_numbers import is_number
from fuse.graph.recording.recording_plan import Plan, Reads
from fuse.graph.signature import Advance, Attribute, MutatedAttribute
from fuse.graph.state.fake_parameters import FakeRegistry
from fuse.graph.state.object_contents import contents
from fuse.graph.structure.result_structure import flatten_result, is_constant

AsInput = Callable[[int | float, str], tuple[Tensor, Any]]
"""Makes a number an input of this name: the fake tensor of the input, and the number that ``forward`` sees."""


class _Absent:
    """The value of an attribute that the module does not have."""

    def __repr__(self) -> str:
        return "no attribute"


ABSENT = _Absent()


class CountedInt:
    """An ``int`` attribute that ``forward`` only adds to; ``delta`` is the sum added so far.

    Any other use is noted, and raises.

    >>> count = CountedInt(Attribute("", "steps"))
    >>> later = 1 + count + 2
    >>> later.delta, isinstance(later, int), count.origin.used
    (3, True, False)
    >>> later < 7
    Traceback (most recent call last):
    ...
    fuse.graph.recording.recording_plan.Reads: forward reads steps
    >>> count.origin.used
    True
    """

    def __init__(self, attribute: Attribute, delta: int = 0, origin: CountedInt | None = None) -> None:
        self.attribute = attribute
        self.delta = delta
        self.origin: CountedInt = self if origin is None else origin
        self.used = False

    __class__ = property(lambda self: int)  # the class that isinstance sees

    def __add__(self, other: Any) -> Any:
        return self._moved(other) if type(other) is int else self._use()

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._moved(-other) if type(other) is int else self._use()

    def _moved(self, by: int) -> CountedInt:
        return CountedInt(self.attribute, self.delta + by, self.origin)

    def _use(self, *_: Any, **__: Any) -> Any:
        self.origin.used = True
        raise Reads([self.attribute])


_OTHER_METHODS = """
    abs and bool ceil complex divmod eq float floor floordiv format ge getitem gt hash index int invert iter le lshift
    lt matmul mod mul ne neg next or pos pow rand rdivmod reduce_ex repr rfloordiv rlshift rmatmul rmod rmul ror round
    rpow rrshift rshift rsub rtruediv rxor str truediv trunc xor
"""
for _name in _OTHER_METHODS.split():
    setattr(CountedInt, f"__{_name}__", CountedInt._use)


@dataclass(eq=False)
class _Slot:
    """One attribute under the overlay.

    ``old``: its value before the call, with fake tensors. ``was``: a copy of ``old``, which shows writes into a list in
    it. ``now``: its present value. ``number``: for a number that is an input, the number. ``given``: what the runtime
    passes for it, with fake tensors.
    """

    attribute: Attribute
    module: nn.Module
    old: Any
    was: Any = None
    now: Any = None
    read: bool = False
    assigned: bool = False
    number: int | float | None = None
    given: Any = None

    def __post_init__(self) -> None:
        self.registry = registry_of(self.module, self.attribute.name)

    def takes(self, value: Any) -> bool:
        """Whether assigning ``value`` leaves the attribute in its registry, or outside of registries."""
        if self.registry == "_parameters":
            return value is None or isinstance(value, nn.Parameter)
        return not isinstance(value, (nn.Module, nn.Parameter))

    def assign(self, value: Any) -> None:
        self.now, self.assigned = value, True
        if self.registry:
            self.module.__dict__[self.registry][self.attribute.name] = value

    def seen(self, as_input: AsInput) -> Any:
        """The present value, as ``forward`` sees it. A number becomes an input when it is first read."""
        if self.number is not None and self.given is None and not self.assigned:
            self.given, self.old = as_input(self.number, str(self.attribute))
            self.was = self.now = self.old
        return self.now

    def is_bypassed(self) -> bool:
        """Whether a registry of the module was changed under this name without assigning the attribute."""
        registry = registry_of(self.module, self.attribute.name)
        changed = registry and self.module.__dict__[registry][self.attribute.name] is not self.now
        return registry != self.registry or bool(changed)


@dataclass(eq=False)
class Overlay:
    """The values of some attributes of ``model`` in the capturing thread."""

    model: nn.Module
    plan: Plan
    as_input: AsInput
    slots: list[_Slot] = field(default_factory=list)
    trouble: str = ""

    @contextlib.contextmanager
    def applied(self, fake_of: Callable[[Tensor, str], Tensor]) -> Iterator[None]:
        """A context in which this thread sees fake values of the attributes, and assignments do not reach the model.

        ``fake_of(tensor, name)`` makes the fake tensors.
        """
        if not self.plan.attributes:
            yield
            return
        self.slots = [self._slot(attribute, fake_of) for attribute in self.plan.attributes]
        with contextlib.ExitStack() as stack:
            dictionaries = [slot for slot in self.slots if slot.attribute.entries and type(slot.old) is dict]
            for slot in dictionaries:
                stack.enter_context(self._entries(slot))
            stack.enter_context(self._watched_classes([slot for slot in self.slots if slot not in dictionaries]))
            yield

    @contextlib.contextmanager
    def _entries(self, slot: _Slot) -> Iterator[None]:
        """A context in which this thread sees a dictionary of fake values as the attribute of ``slot``."""
        held, name = slot.module.__dict__, slot.attribute.name
        real = held[name]
        seen = held[name] = FakeRegistry(real, dict(slot.old))
        try:
            yield
            bypassed = held.get(name) is not seen or not contents(real, dict).is_of(seen)
            if bypassed:
                self.trouble = f"forward changes the dictionary {slot.attribute} without its methods"
            slot.now, slot.read, slot.assigned = seen.fake, True, True
        finally:
            held[name] = real

    @contextlib.contextmanager
    def _watched_classes(self, slots: list[_Slot]) -> Iterator[None]:
        modules = {id(slot.module): slot.module for slot in slots}
        classes = {key: type(module) for key, module in modules.items()}
        try:
            for key, module in modules.items():
                own = {slot.attribute.name: slot for slot in slots if slot.module is module}
                object.__setattr__(module, "__class__", _watched(classes[key], module, own, self))
            yield
            for slot in slots:
                if slot.is_bypassed():
                    self.trouble = f"forward writes {slot.attribute} into a registry of its module directly"
        finally:
            for key, module in modules.items():
                object.__setattr__(module, "__class__", classes[key])

    def check(self) -> None:
        """Raise if ``forward`` did anything that the overlay cannot represent."""
        if self.trouble:
            raise CaptureError(self.trouble)
        if used := [s.attribute for s in self.slots if _is_count(s.old) and s.old.used]:
            raise Reads(used)
        for slot in self.slots:
            if not _as_it_was(slot.old, slot.was):
                raise CaptureError(f"forward changes an object in the attribute {slot.attribute}")
            for leaf in flatten_result(slot.now)[0] if slot.assigned else ():
                if not (isinstance(leaf, Tensor) or _is_count(leaf) or is_number(leaf) or is_constant(leaf)):
                    raise CaptureError(
                        f"forward assigns a {type(leaf).__name__} to the attribute {slot.attribute}; a graph cannot "
                        "make a new one in each call"
                    )

    def counts(self) -> list[Attribute]:
        """The attributes that are taken for counts."""
        return [slot.attribute for slot in self.slots if _is_count(slot.old)]

    def refuse_counts(self, result: Any) -> None:
        """Raise if the result of the call contains a count."""
        if counts := [leaf.attribute for leaf in flatten_result(result)[0] if _is_count(leaf)]:
            raise Reads(counts)

    def leaves(self) -> list[Any]:
        """The fake tensors of all attributes that are read, in the order in which the runtime passes real values."""
        return flatten_result(tuple(slot.given for slot in self.slots if slot.read and not _is_count(slot.old)))[0]

    def numbers(self) -> dict[int, Attribute]:
        """The attributes whose numbers are inputs, by the ``id`` of the input's fake tensor."""
        return {id(slot.given): slot.attribute for slot in self.slots if slot.number is not None and slot.read}

    def assigned(self) -> tuple[Any, ...]:
        """The values to assign after the call, with :class:`fuse.graph.signature.Advance` for counts."""
        numbers = {slot.attribute: number for number, slot in enumerate(self.slots)}
        values = tuple(slot.now for slot in self.slots if slot.assigned)
        leaves, spec = flatten_result(values)
        leaves = [Advance(numbers[leaf.attribute], leaf.delta) if _is_count(leaf) else leaf for leaf in leaves]
        return tuple(pytree.tree_unflatten(leaves, spec))

    def mutated(self) -> tuple[MutatedAttribute, ...]:
        return tuple(
            MutatedAttribute(
                slot.attribute,
                slot.read and not _is_count(slot.old),
                slot.assigned,
                counted=_is_count(slot.old),
                number=slot.number is not None,
            )
            for slot in self.slots
        )

    def _slot(self, attribute: Attribute, fake_of: Callable[[Tensor, str], Tensor]) -> _Slot:
        module = self.model.get_submodule(attribute.owner)
        value = _real(module, attribute.name)
        if not (attribute.entries and type(value) is dict) and (custom := custom_method(type(module))):
            raise CaptureError(f"forward assigns the attribute {attribute} of a class that has its own {custom}")
        if attribute.entries and type(value) not in (dict, list):
            raise CaptureError(
                f"forward changes entries of the attribute {attribute}, which is not a dictionary or list any more"
            )
        leaves, spec = flatten_result(value)
        if odd := [x for x in leaves if not (isinstance(x, Tensor) or x is ABSENT or is_constant(x))]:
            raise CaptureError(f"forward assigns the attribute {attribute}, which holds a {type(odd[0]).__name__}")
        if type(value) in (int, float) and attribute in self.plan.numbers:
            return _Slot(attribute, module, None, number=value)
        if type(value) is float and attribute not in self.plan.plain:
            raise Reads([attribute])
        if type(value) is int and attribute not in self.plan.plain:
            old: Any = CountedInt(attribute)
        else:
            names = [str(attribute)] if len(leaves) == 1 else [f"{attribute}[{i}]" for i in range(len(leaves))]
            tensors = zip(leaves, names, strict=True)
            fakes = [fake_of(leaf, name) if isinstance(leaf, Tensor) else leaf for leaf, name in tensors]
            old = pytree.tree_unflatten(fakes, spec)
        if attribute.entries and type(value) is list:  # forward changes a list of its own
            return _Slot(attribute, module, old, _contents(old), _contents(old), read=True, assigned=True, given=old)
        return _Slot(attribute, module, old, was=_contents(old), now=old, given=old)


REGISTRIES = ("_buffers", "_parameters")


def registry_of(module: nn.Module, name: str) -> str:
    """The registry of ``module`` that has the attribute ``name``; empty if none has.

    >>> registry_of(nn.Linear(1, 1), "weight"), registry_of(nn.Linear(1, 1), "in_features")
    ('_parameters', '')
    """
    return next((registry for registry in REGISTRIES if name in module.__dict__[registry]), "")


def current(module: nn.Module, name: str) -> Any:
    """The attribute, buffer or parameter called ``name``, or :data:`ABSENT`.

    >>> current(nn.Linear(1, 1), "in_features"), current(nn.Linear(1, 1), "out")
    (1, no attribute)
    """
    held = module.__dict__
    if name in held:
        return held[name]
    return held["_buffers"][name] if name in held["_buffers"] else held["_parameters"].get(name, ABSENT)


def _real(module: nn.Module, name: str) -> Any:
    """As :func:`current`, but no fake tensor of the capture."""
    registry = module.__dict__.get(registry_of(module, name))
    return registry.real[name] if isinstance(registry, FakeRegistry) else current(module, name)


def _watched(cls: Any, module: nn.Module, slots: dict[str, _Slot], overlay: Overlay) -> type:
    """A subclass of ``cls``; in this thread, ``slots`` are the attributes of its instance ``module``."""
    thread = threading.get_ident()

    def __getattribute__(self: Any, name: str) -> Any:
        if name in slots and self is module and threading.get_ident() == thread:
            slot = slots[name]
            slot.read = slot.read or not slot.assigned
            if (value := slot.seen(overlay.as_input)) is not ABSENT:
                return value
        elif name == "__class__":
            return cls
        elif name == "__dict__" and threading.get_ident() == thread and not asked_by_torch():
            overlay.trouble = f"forward reads the __dict__ of {cls.__name__}, whose {next(iter(slots))} it assigns"
        return cls.__getattribute__(self, name)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name in slots and self is module and threading.get_ident() == thread:
            if slots[name].attribute.entries:
                overlay.trouble = f"forward assigns the list {slots[name].attribute}, and changes its items"
            if not slots[name].takes(value):
                overlay.trouble = f"forward assigns {slots[name].attribute} a {type(value).__name__}"
            slots[name].assign(value)
        else:
            cls.__setattr__(self, name, value)

    def register_buffer(self: Any, name: str, tensor: Any, persistent: bool = True) -> None:
        if again(self, name, "_buffers", tensor) and persistent is (name not in self._non_persistent_buffers_set):
            slots[name].assign(tensor)
        else:
            cls.register_buffer(self, name, tensor, persistent)

    def register_parameter(self: Any, name: str, param: Any) -> None:
        if again(self, name, "_parameters", param):
            slots[name].assign(param)
        else:
            cls.register_parameter(self, name, param)

    def again(self: Any, name: str, registry: str, value: Any) -> bool:
        """Whether ``value`` is registered where another one is already, by torch's own method."""
        mine = name in slots and self is module and threading.get_ident() == thread
        return mine and slots[name].registry == registry and _may_be_registered(slots[name], value)

    def __delattr__(self: Any, name: str) -> None:
        if name in slots and self is module and threading.get_ident() == thread:
            overlay.trouble = f"forward deletes the attribute {slots[name].attribute}"
        cls.__delattr__(self, name)

    members: dict[str, Any] = {f.__name__: f for f in (__getattribute__, __setattr__, __delattr__)}
    if (cls.register_buffer, cls.register_parameter) == (nn.Module.register_buffer, nn.Module.register_parameter):
        members |= {"register_buffer": register_buffer, "register_parameter": register_parameter}
    described = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: type = type(cls)(cls.__name__, (cls,), {**members, **described, "__slots__": ()})
    return made


def _may_be_registered(slot: _Slot, value: Any) -> bool:
    return value is None or (isinstance(value, Tensor) and slot.takes(value))


def custom_method(cls: type) -> str:
    """The name of a method of ``cls`` that an overlay would bypass; empty if there is none."""
    for name in ("__setattr__", "__delattr__", "__getattribute__", "__init_subclass__"):
        if any(name in base.__dict__ for base in cls.__mro__ if base not in (nn.Module, object)):
            return name
    return ""


def asked_by_torch() -> bool:
    """Whether the caller's caller is code of torch's modules, or of this package."""
    asking: str = sys._getframe(2).f_globals.get("__name__", "")
    return asking.startswith(("torch.nn.modules.", "fuse.graph."))


def _is_count(value: Any) -> bool:
    return type(value) is CountedInt


def _contents(value: Any) -> Any:
    """A copy of the containers in ``value``, with the same leaves."""
    leaves, spec = flatten_result(value)
    return pytree.tree_unflatten(leaves, spec)


def _as_it_was(value: Any, was: Any) -> bool:
    """Whether ``value`` has the structure and the same leaves as its copy ``was``."""
    (leaves, spec), (before, structure) = flatten_result(value), flatten_result(was)
    return spec == structure and all(a is b for a, b in zip(leaves, before, strict=True))
