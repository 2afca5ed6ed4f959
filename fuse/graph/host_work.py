"""Find the host work at the start of a model's ``forward``, and split ``forward`` behind it.

    def forward(self, texts):                          host    ids = ...; words = torch.tensor(ids)        in Python
        ids = [self.vocabulary[w] for w in ...]   ->               words is passed on
        words = torch.tensor(ids)                      device  return self.classify(self.embed(words))     fused
        return self.classify(self.embed(words))

``forward`` runs once, up to the first operator that reads a weight, and each call in it is noted. The statements before
that operator's statement are host work, except the last ones that only compute tensors from tensors: these are worth
fusing. Both parts are compiled from the source of ``forward`` with its line numbers, so that reports and tracebacks
name the user's lines.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import random
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fuse.errors import FuseError
from fuse.graph.naming import named_arguments
from fuse.graph.sources import Line, line_at
from fuse.graph.state.python_generators import global_generators
from fuse.graph.state.reachable_state import ReachableState, reached_by

_READS = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"})
_WRITES = re.compile(r".*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|[lr]shift|matmul)__")
_READS_OF_LAYOUT = frozenset({"__get__", "size", "stride", "dim", "numel", "__len__", "is_contiguous"})


class NoHostWork(FuseError):
    """The reason why no host work can be split off."""


@dataclass(frozen=True)
class HostWork:
    """``forward`` in two parts.

    ``lines``: first and last line of the host part. ``crossing``: the names of the values that it passes on.
    ``changes``: anything else that it changes, or None. ``host(model, *args, **kwargs)`` returns a value for each name;
    ``device(model, **values)`` runs the rest.
    """

    lines: tuple[Line, Line]
    crossing: tuple[str, ...]
    changes: str | None
    host: Callable[..., dict[str, Any]]
    device: Callable[..., Any]

    def run(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the host part; returns the values that it passes on, by name.

        Raises:
            FuseError: the host part reads a weight or writes to an argument, which it must not, because it runs ahead.
        """
        with _Unread(model, (args, kwargs)):
            return self.host(model, *args, **kwargs)


class DeviceStage(nn.Module):
    """The rest of a model's ``forward``; its keyword arguments are the values that the host part passes on."""

    def __init__(self, model: nn.Module, work: HostWork) -> None:
        super().__init__()
        self.model = model
        self._device = work.device
        self.training = model.training

    def forward(self, **values: Any) -> Any:
        return self._device(self.model, **values)


def host_work(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> HostWork:
    """The host work at the start of ``model(*args, **kwargs)``. The call runs once, up to the first weight.

    Raises:
        NoHostWork: there is none, or it cannot be split off; the message is the reason.
        Exception: any error of ``forward``.
    """
    forward = _Forward.of(model)
    calls = _watched(forward, model, args, kwargs)
    body = forward.definition.body
    first = next((i for i, one in enumerate(body) if _holds(one, calls.reached)), 0) if calls.reached else 0
    if not calls.reached:
        raise NoHostWork("no operator reads a weight")
    while first and _is_tensor_work(body[first - 1], calls):
        first -= 1
    prefix = body[:first]
    if not prefix or not any(line for line in calls.host if any(_holds(one, line) for one in prefix)):
        raise NoHostWork(f"no statement of forward before {forward.line(calls.reached)} does host work")
    if bad := next((n for one in prefix for n in ast.walk(one) if isinstance(n, _UNCUT)), None):
        raise NoHostWork(f"{type(bad).__name__.lower()} at {forward.line(bad.lineno)} is part of the host work")
    return forward.cut(first, calls.changes)


# ---- the text of forward -------------------------------------------------------------------------------------------

_UNCUT = (
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
)
"""Statements that cannot be moved to another function: they end ``forward``, or bind a name that is used later."""


@dataclass(frozen=True)
class _Forward:
    """The source of a model's ``forward``."""

    function: types.FunctionType
    definition: ast.FunctionDef

    @staticmethod
    def of(model: nn.Module) -> _Forward:
        name = type(model).__name__
        function = type(model).forward
        hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
        if any(hooks) or "forward" in vars(model):
            raise NoHostWork(f"{name} has hooks, or an instance attribute named forward")
        if type(model).__call__ is not nn.Module.__call__:
            raise NoHostWork(f"a call of {name} does more than run forward (such as change the precision)")
        if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
            raise NoHostWork(f"forward of {name} is not a plain function")
        try:
            lines, start = inspect.getsourcelines(function)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, SyntaxError) as error:
            raise NoHostWork(f"the source of forward of {name} cannot be read") from error
        definition = tree.body[0]
        if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
            raise NoHostWork(f"forward of {name} is decorated, or not a plain function")
        ast.increment_lineno(tree, start - 1)
        return _Forward(function, definition)

    def line(self, number: int) -> Line:
        return line_at(self.function.__code__.co_filename, number)

    def cut(self, at: int, changes: str | None) -> HostWork:
        """Split before statement number ``at``."""
        body, arguments = self.definition.body, self.definition.args
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        given += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
        owner, *names = [one.arg for one in given]
        written = {n.id for one in body[:at] for n in ast.walk(one) if isinstance(n, ast.Name) and not _loads(n)}
        written |= {
            (n.asname or n.name).split(".")[0] for one in body[:at] for n in ast.walk(one) if isinstance(n, ast.alias)
        }
        read = {n.id for one in body[at:] for n in ast.walk(one) if isinstance(n, ast.Name)}
        if owner in written:
            raise NoHostWork(f"host work assigns {owner}")
        crossing = tuple(sorted((written | set(names)) & read))
        last = body[at - 1].end_lineno or body[at - 1].lineno
        handed = f"return {{name: value for name, value in locals().items() if name in {set(crossing) or ()!r}}}"
        device = ast.parse(f"def forward({', '.join([owner, *(f'{name}=None' for name in crossing)])}): pass").body[0]
        assert isinstance(device, ast.FunctionDef)
        return HostWork(
            (self.line(_code(body)[0].lineno), self.line(last)),
            crossing,
            changes,
            self._compiled(arguments, [*body[:at], *_at(last, ast.parse(handed))]),
            self._compiled(device.args, body[at:], (None,) * len(crossing)),
        )

    def _compiled(
        self, arguments: ast.arguments, body: list[ast.stmt], defaults: tuple[None, ...] | None = None
    ) -> Any:
        """A function with the globals, closure and class of ``forward``, and its defaults unless ``defaults`` are
        given."""
        code, function = self.function.__code__, self.function
        owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2] or "Model"  # for names like __private
        free = [name for name in code.co_freevars if name != "__class__"]
        module = ast.parse(f"def around({', '.join(free)}):\n class {owner}:\n  def forward(): pass")
        _at(self.definition.lineno, module)
        bare = copy.deepcopy(arguments)  # the function gets the default values of ``forward``
        bare.defaults = _at(self.definition.lineno, ast.parse("None\n" * len(arguments.defaults)))
        bare.kw_defaults = [value and ast.copy_location(ast.Constant(None), value) for value in arguments.kw_defaults]
        for node in ast.walk(bare):
            if isinstance(node, ast.arg):
                node.annotation = None
        inner: Any = module.body[0]
        inner = inner.body[0].body[0]
        inner.args, inner.body = bare, body
        made: types.CodeType = compile(ast.fix_missing_locations(module), code.co_filename, "exec")
        for name in ("around", owner, "forward"):
            made = next(c for c in made.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        part = types.FunctionType(
            made,
            function.__globals__,
            "forward",
            function.__defaults__ if defaults is None else defaults,
            tuple(cells[name] for name in made.co_freevars),
        )
        part.__kwdefaults__ = function.__kwdefaults__ if defaults is None else None
        return part


def _at(line: int, module: ast.Module) -> list[Any]:
    """The statements of ``module``, or the values of expressions, moved to ``line``."""
    for node in ast.walk(module):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = line  # type: ignore[attr-defined]  # it has one
    return [one.value if isinstance(one, ast.Expr) else one for one in module.body]


def _code(body: list[ast.stmt]) -> list[ast.stmt]:
    """``body`` without a docstring."""
    first = body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if documented and len(body) > 1 else body


def _loads(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def _holds(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


# ---- forward, watched ----------------------------------------------------------------------------------------------


@dataclass
class _WatchedCalls:
    """Notes on a run of ``forward``, as line numbers.

    ``reached``: the first line that reads a weight; 0 if none does. ``host``: lines that make tensors from Python
    values, or read values of tensors. ``tensors``: lines that compute tensors from tensors. ``changes``: a changed
    object, or None.
    """

    reached: int
    host: set[int]
    tensors: set[int]
    changes: str | None = None


class _Reached(BaseException):
    """Ends ``forward`` at the first operator that reads a weight."""


def _is_tensor_work(statement: ast.stmt, calls: _WatchedCalls) -> bool:
    """Whether a statement computes tensors from tensors, and nothing else was noted for its lines."""

    def inside(lines: set[int]) -> bool:
        return any(_holds(statement, line) for line in lines)

    simple = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr))
    return simple and inside(calls.tensors) and not inside(calls.host)


def _watched(forward: _Forward, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _WatchedCalls:
    """Run ``forward`` until it reads a weight; then restore changed objects and random generators."""
    calls = _WatchedCalls(0, set(), set())
    before = reached_by_host_work(model, named_arguments(model, args, kwargs))
    with _generators_kept():
        try:
            with _Watch(forward.function.__code__, model, (args, kwargs), calls):
                forward.function(model, *args, **kwargs)
        except _Reached:
            pass
        finally:
            changes = before.restore(lambda real, then: False)
    calls.changes = changes[0].name if changes else None
    return calls


class _Unread(TorchFunctionMode):
    """Refuses operators that read weights or write to arguments, which would be too early: host work runs ahead."""

    def __init__(self, model: nn.Module, arguments: Any) -> None:
        super().__init__()
        self.weights = set(map(_memory, (*model.parameters(), *model.buffers()))) - {None}
        self.arguments = {_memory(t) for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)} - {None}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _READS_OF_LAYOUT:
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            if any(_memory(t) in self.weights for t in tensors):
                self.reads_weight(name)
            if _writes(name) and tensors and _memory(tensors[0]) in self.arguments:
                raise NoHostWork(f"{name} writes to an argument in the host work")
            return self.ran(name, tensors, func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def reads_weight(self, name: str) -> None:
        raise NoHostWork(f"{name} reads a weight in the host work")

    def ran(self, name: str, tensors: Sequence[Tensor], result: Any) -> Any:
        return result


class _Watch(_Unread):
    """Notes the work of each line of ``forward``, until it reads a weight."""

    def __init__(self, code: types.CodeType, model: nn.Module, arguments: Any, calls: _WatchedCalls) -> None:
        super().__init__(model, arguments)
        self.code, self.calls = code, calls
        self.known = {id(t): t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)}

    def reads_weight(self, name: str) -> None:
        self.calls.reached = self._line()
        raise _Reached

    def ran(self, name: str, tensors: Sequence[Tensor], result: Any) -> Any:
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        strange = any(id(t) not in self.known for t in tensors)  # made from an array without a torch function
        if name in _READS or strange or (made and not tensors and _is_given_values(name)):
            self.calls.host.add(self._line())
        elif made and tensors:
            self.calls.tensors.add(self._line())
        self.known |= {id(t): t for t in (*made, *tensors)}
        return result

    def _line(self) -> int:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        return frame.f_lineno if frame is not None else 0


def _is_given_values(name: str) -> bool:
    return name in ("tensor", "as_tensor", "from_numpy", "frombuffer", "asarray", "scalar_tensor")


def _writes(name: str) -> bool:
    return _WRITES.fullmatch(name) is not None


def _memory(tensor: Tensor) -> int | None:
    """The identity of a tensor's storage, which views share; None if it has no single storage."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


# ---- random generators ---------------------------------------------------------------------------------------------

GeneratorStates = dict[str, tuple[Any, ...]]
"""Name of a random generator of the process -> its state."""


def states() -> GeneratorStates:
    """The states of the random generators of the process: Python's, torch's and numpy's.

    >>> before = states()
    >>> _ = random.random()
    >>> [name for name, state in states().items() if before[name] != state]
    ['random']
    >>> set_states(before)
    >>> states() == before
    True
    """
    found: GeneratorStates = {"random": random.getstate(), "torch": (torch.get_rng_state().numpy().tobytes(),)}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    return found


def set_states(given: GeneratorStates) -> None:
    """Set the random generators to states returned by :func:`states`."""
    for name, state in given.items():
        if name == "random":
            random.setstate(state)
        elif name == "torch":
            torch.set_rng_state(torch.frombuffer(bytearray(state[0]), dtype=torch.uint8))
        else:
            numpy = sys.modules["numpy"]
            kind, keys, *rest = state
            numpy.random.set_state((kind, numpy.frombuffer(keys, dtype="uint32"), *rest))


def reached_by_host_work(model: nn.Module, arguments: Mapping[str, Any] = types.MappingProxyType({})) -> ReachableState:
    """The state that host work reaches, without the generators of :func:`states`, whose states go with each batch."""
    reached, carried = reached_by(model, arguments), list(global_generators())
    return replace(reached, generators=[pair for pair in reached.generators if pair[0] not in carried])


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """A context that restores the random generators at its end."""
    before = states()
    try:
        yield
    finally:
        set_states(before)
