"""Calls of submodules that stay Python in the middle of a program.

    graph             in each call of the model
    a = mm(x, w)      native
    b = odd(a)        odd.forward(a), once, on the tensors that eager would give it; what else it does is its own
    c = relu(b)       native

How such a call is given its arguments and what it makes is watched in a call that runs eager
(:mod:`fuse.graph.cutting`), and expected from then on. It runs once in each call of the model: a :class:`Journal` notes
it, and where the program ends in an exception behind it, the model runs eager and is answered from the journal.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fuse.devices import autocast_modes, has_kernels
from fuse.errors import CaptureError, FuseError
from fuse.graph.cut_reading import Setting
from fuse.graph.learned import Guard, bits, same_bits
from fuse.graph.outside import Outside
from fuse.graph.read_numbers import is_number
from fuse.graph.results import is_constant
from fuse.graph.signature import Dispatch

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Dtype, size and strides."""


@dataclass(frozen=True)
class TensorPlace:
    """In the place of a tensor: which one of a list."""

    index: int


class Unsuitable(CaptureError):
    """A call of the submodule ``path`` cannot stay Python in the middle of a program."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} cannot run by itself: {reason}")
        self.path = path
        self.reason = reason


class NotAsWatched(CaptureError):
    """``forward`` calls a submodule that stays Python otherwise than when it was watched."""


class Unforeseen(Exception):
    """A call of a submodule did something else than when it was watched. It has run, and is in the journal. It changed
    ``settings`` that the rest of the model reads."""

    def __init__(self, path: str, source: str, problem: str, settings: tuple[Setting, ...] = ()) -> None:
        super().__init__(f"{path} {problem}, which it did not when it was watched")
        self.op, self.source, self.settings = path, source, settings


class Spoilt(FuseError):
    """As :class:`Unforeseen`, and what it did cannot be undone: nobody knows what the call would give."""


class Otherwise(Exception):
    """A value that was learned before the call of a submodule differs now."""


def taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` with a :class:`TensorPlace` for each tensor in it; new tensors are added to ``tensors``.

    Raises:
        ValueError: it holds what a call cannot be given again, or something that can be changed; says what.

    >>> x, tensors = torch.ones(1), []
    >>> taken_apart((x, 3, (x,)), tensors), len(tensors)
    ((TensorPlace(index=0), 3, (TensorPlace(index=0),)), 1)
    """
    if isinstance(value, Tensor):
        known = next((index for index, one in enumerate(tensors) if one is value), None)
        if known is None:
            tensors.append(value)
        return TensorPlace(len(tensors) - 1 if known is None else known)
    if is_number(value):
        raise ValueError("a number that was read from a tensor")
    if type(value) is tuple:
        return tuple(taken_apart(one, tensors) for one in value)
    if not is_constant(value):
        raise ValueError(f"a {type(value).__name__}")
    return value


def put_together(template: Any, tensors: Sequence[Tensor]) -> Any:
    """The value that :func:`taken_apart` took apart, with other tensors."""
    if isinstance(template, TensorPlace):
        return tensors[template.index]
    if type(template) is tuple:
        return tuple(put_together(one, tensors) for one in template)
    return template


def alike(one: Any, other: Any) -> bool:
    """Whether two templates are the same, numbers bit by bit.

    >>> alike((TensorPlace(0), 1.0), (TensorPlace(0), 1.0)), alike((TensorPlace(0), 1), (TensorPlace(0), True))
    (True, False)
    """
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(alike, one, other))
    return one is other or bool(bits(one) == bits(other))


def layout_of(tensor: Tensor) -> Layout:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def oddity(tensor: Tensor) -> str:
    """Why a tensor is not one that programs compute with; empty where it is."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"a {type(tensor).__name__}"
    if tensor.layout is not torch.strided or not has_kernels(tensor):
        return f"a tensor of layout {tensor.layout} on {tensor.device}"
    if tensor.is_conj() or tensor.is_neg() or tensor.requires_grad:
        return "a tensor that needs gradients, or that is lazily conjugated or negated"
    return ""


def meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may share memory.

    >>> x = torch.zeros(8)
    >>> meet(x[:4], x[4:]), meet(x[:5], x[4:])
    (False, True)
    """
    (first, last), (start, stop) = _span(one), _span(other)
    return first < stop and start < last


def _span(tensor: Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize


@dataclass(frozen=True)
class Watched:
    """How one call of a submodule was given its arguments, ``given`` with a slot for each tensor, and what it gave:
    ``returned``, whose slots count on behind the arguments' to tensors that it ``made``. ``gradients``: whether they
    were on. ``dispatches``: what it launched, where that was recorded."""

    path: str
    given: Any
    tensors: tuple[Layout, ...]
    returned: Any
    made: tuple[Layout, ...]
    gradients: bool
    dispatches: tuple[Dispatch, ...] = ()


@dataclass(eq=False)
class Noted:
    """A call of a submodule that ran: what it was given and gave (tensors that it ``made`` among it), or raised, and
    the state of torch's generator behind it. ``written``: positions of tensors that it wrote to. ``assigned``: settings
    that the rest of the model reads, and what it assigned to them. ``problem``: what it did otherwise than when it was
    watched, which is ``lasting`` where it cannot be undone."""

    path: str
    tensors: tuple[Tensor, ...]
    before: tuple[Tensor, ...]
    result: Any = None
    error: Exception | None = None
    made: tuple[Tensor, ...] = ()
    state: Tensor | None = None
    written: tuple[int, ...] = ()
    after: tuple[Tensor, ...] = ()
    assigned: tuple[tuple[Setting, Any], ...] = ()
    problem: str = ""
    lasting: bool = False

    def undo(self) -> None:
        """Let the tensors that it was given, and settings, be what they were before it."""
        for index in self.written:
            self.tensors[index].copy_(self.before[index])
        for setting, _ in self.assigned:
            setting.assign(setting.value)

    def check(self, given: Sequence[Tensor]) -> None:
        """Raise where a call in its place is given something else.

        Raises:
            Spoilt: it is, by more than roundings: Python took another way than when it ran.
        """
        pairs = list(zip(given, self.before, strict=False))
        same = len(given) == len(self.before) and all(one.shape == other.shape for one, other in pairs)
        if not same or not all(_near(one.detach(), other) for one, other in pairs):
            raise Spoilt(f"{self.path} has already run in this call, and its repetition calls it with other values")

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call, for a repeated call with equal arguments."""
        assert self.state is not None
        torch.set_rng_state(self.state)
        given: list[Tensor] = []
        taken_apart((args, tuple(kwargs.items())), given)
        self.check(given)
        with torch.no_grad():
            for index in self.written:
                given[index].copy_(self.after[index])
        for setting, value in self.assigned:
            setting.assign(value)
        if self.error is not None:
            raise self.error
        return self.result


def modes() -> tuple[Any, ...]:
    """The modes of torch that a submodule may notice."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_modes(),
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.are_deterministic_algorithms_enabled(),
    )


def run(
    path: str,
    forward: Callable[..., Any],
    given: tuple[tuple[Any, ...], dict[str, Any]],
    shared: Outside,
    rest: Sequence[Tensor],
) -> Noted:
    """Call ``forward`` and note what it did: to what it was given, to what is ``shared`` with the rest of the model,
    and to tensors of the ``rest``."""
    tensors: list[Tensor] = []
    taken_apart((given[0], tuple(given[1].items())), tensors)
    with torch.no_grad():
        noted = Noted(path, tuple(tensors), tuple(tensor.detach().clone() for tensor in tensors))
    layouts = [layout_of(tensor) for tensor in tensors]
    shared, versions, before = shared.again(), _versions(rest), modes()
    try:
        noted.result = forward(*given[0], **given[1])
    except Exception as error:  # of the user's code
        noted.error = error
    noted.state = torch.get_rng_state()
    if modes() != before:
        noted.problem, noted.lasting = "changes the modes of torch", True
        return noted
    if [layout_of(tensor) for tensor in tensors] != layouts:
        noted.problem, noted.lasting = "reshapes what it is given in place", True
        return noted
    with torch.no_grad():
        pairs = enumerate(zip(tensors, noted.before, strict=True))
        noted.written = tuple(index for index, (now, then) in pairs if not same_bits(now.detach(), then))
        if noted.written:
            noted.after = tuple(tensor.detach().clone() for tensor in tensors)
            noted.problem = "writes to what it is given"
    if changed := shared.changed() or (versions != _versions(rest) and not noted.written and "a tensor"):
        noted.problem, noted.lasting = f"changes {changed}, which the rest of the model reads", True
    return noted


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def fault_of_result(noted: Noted, earlier: Sequence[Noted]) -> tuple[str, Any]:
    """Why what a call gave cannot be used in a program (empty where it can), and its template. Notes what it made."""
    tensors = list(noted.tensors)
    try:
        template = taken_apart(noted.result, tensors)
    except ValueError as what:
        return f"returns {what}", None
    made = noted.made = tuple(tensors[len(noted.tensors) :])
    if kinds := [kind for tensor in made if (kind := oddity(tensor))]:
        return f"returns {kinds[0]}", template
    others = [*noted.tensors, *(tensor for one in earlier for tensor in (*one.tensors, *one.made))]
    for index, tensor in enumerate(made):
        if any(meet(tensor, other) for other in (*others, *made[:index])):
            return "returns memory that it was given, or that it returned before", template
    return "", template


class Keeping:
    """Copies of what calls were given and gave, to see whether a later call changes it.

    >>> noted = Noted("odd", (torch.ones(2),), (torch.ones(2),), made=(torch.zeros(2),))
    >>> keeping = Keeping()
    >>> keeping.add(noted)
    >>> keeping.is_unchanged()
    True
    >>> _ = noted.made[0].add_(1)
    >>> keeping.is_unchanged()
    False
    """

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor]] = []

    def add(self, noted: Noted) -> None:
        with torch.no_grad():
            self._held += zip(noted.tensors, noted.before, strict=True)
            self._held += [(tensor, tensor.detach().clone()) for tensor in noted.made]

    def is_unchanged(self) -> bool:
        return all(same_bits(now.detach(), then) for now, then in self._held)


@dataclass(eq=False)
class Journal:
    """The calls of submodules that ran in one call of a model, in order; ``position`` of them were asked for since it
    began or began again. ``inputs`` are those of the program that runs, ``kept`` those that it writes to."""

    noted: list[Noted] = field(default_factory=list)
    position: int = 0
    inputs: Sequence[Tensor] = ()
    kept: Sequence[Tensor] = ()
    keeping: Keeping = field(default_factory=Keeping)

    def begin(self, inputs: Sequence[Tensor] = (), written: Collection[int] = ()) -> None:
        """What follows is the whole call once more, by a program with these inputs, some of which it writes to."""
        self.position, self.inputs, self.kept = 0, inputs, [inputs[i] for i in written]

    def raised(self, error: Exception) -> bool:
        """Whether a submodule raised ``error``."""
        return any(noted.error is error for noted in self.noted)

    def next(self, path: str) -> Noted | None:
        """The next call as it ran already, if it did."""
        self.position += 1
        if self.position > len(self.noted):
            return None
        found = self.noted[self.position - 1]
        if found.path != path:
            raise Spoilt(f"{path} is called where {found.path} was called before in the same call")
        return found


class _Here(threading.local):
    journal: Journal | None = None


_here = _Here()


@contextlib.contextmanager
def journaled() -> Iterator[Journal]:
    """A journal for one call of a model in this thread."""
    before, _here.journal = _here.journal, Journal()
    try:
        yield _here.journal
    finally:
        _here.journal = before


def journal() -> Journal | None:
    """The journal of this thread's current call."""
    return _here.journal


@dataclass(frozen=True)
class Known:
    """Something that was learned of values before a call of a submodule, which it would not be made without."""

    guard: Guard
    expected: Any

    def holds(self, value: Tensor) -> bool:
        if self.guard == "size":
            return bool(tuple(value.shape) == self.expected)
        if self.guard == "values":
            return same_bits(value, self.expected)
        return bool(bits(value.item()) == bits(self.expected))


@dataclass(eq=False)
class CutCall:
    """The operator of a node that calls a submodule: of the values that were learned before it, and of tensors.

    ``shared``: what the submodule and the rest of the model reach. ``settings``: what the rest reads of all submodules
    that stay Python. ``several``: there are other such calls in the
    graph, and this is the ``last`` of them. ``reason``: why it is not captured.
    """

    path: str
    module: nn.Module
    watched: Watched
    known: tuple[Known, ...]
    shared: Outside
    source: str
    reason: str
    settings: tuple[Setting, ...] = ()
    several: bool = False
    last: bool = False

    namespace = "python"
    __module__ = __name__

    @property
    def __name__(self) -> str:
        return f"call_of_{self.path.replace('.', '_')}"

    def __str__(self) -> str:
        return self.path

    def __call__(self, learned: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that the submodule makes.

        Raises:
            Otherwise: this call is not one of those that the program was made for; the submodule has not run.
            Unforeseen, Spoilt: the submodule did something else than when it was watched.
            Exception: what the submodule raises.
        """
        here = journal()
        if here is None:
            raise CaptureError(f"{self.path} is Python, which only calls of a compiled model run")
        if not all(known.holds(value) for known, value in zip(self.known, learned, strict=True)):
            raise Otherwise
        noted = here.next(self.path)
        if noted is None:
            noted = self._run(here, tensors)
            here.noted.append(noted)
        elif noted.state is not None:
            noted.check(tensors)
            torch.set_rng_state(noted.state)
        if noted.problem:
            if noted.lasting:
                raise Spoilt(
                    f"{self.path} {noted.problem}; it did not when fuse watched it. Leave {self.path} out of what is "
                    "compiled, or let it be so in the first call, too"
                )
            raise Unforeseen(self.path, self.source, noted.problem, tuple(one for one, _ in noted.assigned))
        if noted.error is not None:
            raise noted.error
        return noted.made

    def _run(self, here: Journal, tensors: Sequence[Tensor]) -> Noted:
        laid = [_in_layout(one, layout) for one, layout in zip(tensors, self.watched.tensors, strict=True)]
        args, named = put_together(self.watched.given, laid)
        with torch.set_grad_enabled(self.watched.gradients):
            noted = run(self.path, self.module.forward, (args, dict(named)), self.shared, here.inputs)
        noted.assigned = tuple((one, one.now()) for one in self.settings if not one.holds())
        if noted.assigned and not noted.problem:
            noted.problem = f"changes its attribute {noted.assigned[0][0].name}, which the rest of the model reads"
        if noted.problem or noted.error is not None:
            return noted
        noted.problem, template = fault_of_result(noted, here.noted)
        same = alike(template, self.watched.returned) and tuple(map(layout_of, noted.made)) == self.watched.made
        if not noted.problem and not same:
            noted.problem = "returns something else"
        if not noted.problem and any(meet(one, other) for one in noted.made for other in here.kept):
            noted.problem = "returns memory of an input that is written"
        if self.several:
            if self.last and not here.keeping.is_unchanged():
                noted.problem, noted.lasting = "changes what an earlier call was given or gave", True
            here.keeping.add(noted)
        return noted


def _near(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors differ in roundings only, as those of eager and fused operators do."""
    if one.dtype is not other.dtype or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    largest = other.abs().nan_to_num(0, 0, 0).max().item() if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.02, atol=0.02 * float(largest), equal_nan=True)


def _in_layout(tensor: Tensor, layout: Layout) -> Tensor:
    if layout_of(tensor) == layout:
        return tensor
    dtype, size, stride = layout
    return torch.empty_strided(size, stride, dtype=dtype).copy_(tensor)
