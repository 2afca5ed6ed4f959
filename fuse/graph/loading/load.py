"""Load a model and its example inputs from a Python file, without allocating it where that is possible.

A file follows one of two conventions:

1. ``class Model(nn.Module)``, ``get_init_inputs()`` (list of constructor arguments), ``get_inputs()`` (list of forward
   arguments);
2. ``model`` (a module, or a function returning one) and ``example_inputs`` (a tuple, a dict of keyword arguments, or a
   function returning either).

``path/to/model.py:Name`` loads another class or object of the file instead of the model. For ``fuse bench --against
tuned``, the file may also define ``tuned`` (a module, or a function returning one): a hand-tuned model for the same
arguments.
"""

from __future__ import annotations

import difflib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from fuse.errors import FuseError
from fuse.graph.fakes.fake_mode import FakeMode
from fuse.graph.loading.inputs import CallArguments, InputRequest, parse_input, replace_inputs
from fuse.graph.loading.model_file import (
    ModelFile,
    blame,
    execute,
    is_user_code,
    read_model_file,
    summary,
    user_code_runs,
    user_line,
)
from fuse.graph.loading.settings import parse_setting

CONVENTIONS = (
    "define `class Model(nn.Module)`, `get_init_inputs()` and `get_inputs()`, or `model` and `example_inputs`, "
    "or choose an object with path/to/model.py:Name"
)


@dataclass(frozen=True)
class LoadedModel:
    """A model and the arguments of one call.

    ``notes`` are for the user to read, ``name`` is the class or object of the file that was taken. ``tuned`` is the
    file's hand-tuned peer, where that was asked for.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    notes: tuple[str, ...]
    name: str
    tuned: nn.Module | None = None


def load(
    target: str,
    inputs: Sequence[str] = (),
    settings: Sequence[str] = (),
    real: bool = False,
    *,
    train: bool = False,
    seed: int = 0,
    tuned: bool = False,
) -> LoadedModel:
    """Execute the file of ``target`` and build its model and inputs.

    ``inputs`` are ``NAME=f32[64,16,256]``, ``settings`` are ``NAME=VALUE``, as on the command line. Unless ``real``,
    everything runs under fake tensors, so that a model of any size costs no memory; a file that reads values there is
    loaded for real, with a note. The model is put into ``eval()`` mode unless ``train``, which leaves it as the file
    made it. Values are drawn after ``torch.manual_seed(seed)``. With ``tuned`` the file's hand-tuned peer is built too.

    Raises ``FuseError``, one line with the user's ``file:line``, for whatever is wrong with the file or the requests.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "wide.py"
    >>> _ = path.write_text('''
    ... import torch
    ... width = 1_000_000
    ... model = torch.nn.Linear(width, width)
    ... example_inputs = (torch.ones(2, width),)
    ... ''')
    >>> loaded = load(str(path), settings=["width=2_000_000"])
    >>> loaded.model, loaded.args[0].shape
    (Linear(in_features=2000000, out_features=2000000, bias=True), torch.Size([2, 2000000]))
    """
    file = read_model_file(target, [parse_setting(text) for text in settings])
    requests = [parse_input(text) for text in inputs]
    if real:
        return _build(file, requests, None, train, seed, tuned)
    try:
        return _build(file, requests, _SharedMode(allow_non_fake_inputs=True), train, seed, tuned)
    except FuseError as failure:
        if failure.__cause__ is None or not _may_need_values(failure.__cause__, file):
            raise
        reason = _why_real(failure.__cause__, file)
    try:
        loaded = _build(file, requests, None, train, seed, tuned)
    except FuseError as failure:
        if failure.__cause__ is not None and _why_real(failure.__cause__, file) == reason:
            raise
        raise FuseError(f"{failure} (loaded for real because {reason})") from failure.__cause__
    return replace(loaded, notes=(f"loaded for real, with its weights allocated, because {reason}",))


def _build(
    file: ModelFile,
    requests: Sequence[InputRequest],
    fake_mode: FakeTensorMode | None,
    train: bool,
    seed: int,
    tuned: bool,
) -> LoadedModel:
    with user_code_runs(file.path.parent), _without_values(fake_mode) if fake_mode else nullcontext():
        torch.manual_seed(seed)
        with blame(file, "loading the file"):
            namespace = vars(execute(file))
        name = _chosen_name(file, namespace)
        model = _model(file, name, namespace)
        args, kwargs = _example_inputs(file, namespace, optional=bool(requests))
        with blame(file, "making the inputs"):
            args, kwargs = replace_inputs(requests, model.forward, args, kwargs)
        _check_arguments(file, model, args, kwargs)
        peer = _tuned(file, namespace) if tuned else None
        if not train:
            with blame(file, "calling eval()"):
                for module in (model, peer):
                    if module is not None:
                        module.eval()
    return LoadedModel(model, args, kwargs, (), name, peer)


class _SharedMode(FakeMode):
    """A fake mode that is shared by deep copies of its tensors: the layers of a stack are often copies of the first."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedMode:
        return self


@contextmanager
def _without_values(fake_mode: FakeTensorMode) -> Iterator[None]:
    """A context in which tensors get no storage, and ``trunc_normal_`` draws nothing.

    ``trunc_normal_`` is the one initialiser that reads its samples. If it drew, every vision transformer would have to
    be allocated just to be counted.
    """
    draw = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor
    try:
        with fake_mode:
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = draw


def _may_need_values(cause: BaseException, file: ModelFile) -> bool:
    """Whether the file may load with real tensors.

    Fake tensors raise ``RuntimeError``, and any error inside a library may follow from one. An error of another type on
    the user's own line (a wrong name, a missing argument) would only be raised again, after everything was allocated.
    """
    if isinstance(cause, RuntimeError):
        return True
    frames = traceback.extract_tb(cause.__traceback__)
    inside_library = bool(frames) and not is_user_code(frames[-1].filename, file) and frames[-1].filename != __file__
    return inside_library and isinstance(cause, Exception) and not isinstance(cause, (ImportError, SyntaxError))


def _why_real(cause: BaseException, file: ModelFile) -> str:
    line = user_line(cause, file) or file.shown
    if isinstance(cause, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"{line} depends on the values of a tensor ({cause.func})"
    return f"{line} raised {summary(cause)}"


def _chosen_name(file: ModelFile, namespace: Mapping[str, Any]) -> str:
    if file.choice is not None:
        if file.choice in namespace:
            return file.choice
        close = difflib.get_close_matches(file.choice, _candidates(namespace), n=1)
        advice = (
            f"did you mean {close[0]!r}?" if close else f"it has {', '.join(_candidates(namespace)) or 'no models'}"
        )
        raise FuseError(f"{file.shown} defines no {file.choice!r}; {advice}")
    if "Model" in namespace and "get_inputs" in namespace:
        return "Model"
    for name in ("model", "Model"):
        if name in namespace:
            return name
    found = ", ".join(_candidates(namespace))
    raise FuseError(f"{file.shown} defines no model{f', only {found}' if found else ''}; {CONVENTIONS}")


def _candidates(namespace: Mapping[str, Any]) -> list[str]:
    """Names that the file itself defines and that could be a model."""
    module = namespace["__name__"]
    return [
        name
        for name, value in namespace.items()
        if isinstance(value, nn.Module) or (callable(value) and getattr(value, "__module__", None) == module)
    ]


def _tuned(file: ModelFile, namespace: Mapping[str, Any]) -> nn.Module:
    if "tuned" not in namespace:
        advice = "define `tuned`, a module (or a function returning one) that does the same work, such as nn.LSTM"
        raise FuseError(f"{file.shown} names no hand-tuned peer; {advice}")
    return _model(file, "tuned", namespace)


def _model(file: ModelFile, name: str, namespace: Mapping[str, Any]) -> nn.Module:
    chosen = namespace[name]
    if isinstance(chosen, nn.Module):
        return chosen
    if not callable(chosen):
        raise FuseError(
            f"{file.shown}: {name} is of type {type(chosen).__name__}; it must be an nn.Module or return one"
        )
    arguments: Sequence[Any] = ()
    if isinstance(chosen, type) and "get_init_inputs" in namespace:
        arguments = _called(file, "get_init_inputs", namespace)
        if not isinstance(arguments, (list, tuple)):
            kind = type(arguments).__name__
            raise FuseError(f"{file.shown}: get_init_inputs() is of type {kind}; return the list of {name}'s arguments")
    advice = f"; get_init_inputs() returns the list of {name}'s arguments" if isinstance(chosen, type) else ""
    with blame(file, f"building {name}", _definition(chosen, file), advice):
        model = chosen(*arguments)
    if not isinstance(model, nn.Module):
        raise FuseError(f"{file.shown}: {name}() is of type {type(model).__name__}; it must be an nn.Module")
    return model


def _definition(chosen: Callable[..., Any], file: ModelFile) -> str | None:
    """Where the class's constructor, or the function, is written."""
    function = inspect.getattr_static(chosen, "__init__") if isinstance(chosen, type) else chosen
    code = getattr(function, "__code__", None)
    return f"{file.shown}:{code.co_firstlineno}" if code is not None and code.co_filename == str(file.path) else None


def _example_inputs(file: ModelFile, namespace: Mapping[str, Any], optional: bool) -> CallArguments:
    if "get_inputs" in namespace:
        name, given = "get_inputs()", _called(file, "get_inputs", namespace)
    elif "example_inputs" in namespace:
        name, given = "example_inputs", namespace["example_inputs"]
        if callable(given):
            name, given = "example_inputs()", _called(file, "example_inputs", namespace)
    elif optional:
        return (), {}
    else:
        advice = "define get_inputs() or example_inputs, or give every input with --input NAME=f32[64,16,256]"
        raise FuseError(f"{file.shown} defines no inputs of the model; {advice}")
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, (list, tuple)):
        return tuple(given), {}
    kind = "Tensor" if isinstance(given, torch.Tensor) else type(given).__name__  # it may be fake
    raise FuseError(
        f"{file.shown}: {name} is of type {kind}; it must be a tuple or list of forward's arguments, or a dict"
    )


def _check_arguments(file: ModelFile, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ``FuseError`` where Python could not call ``forward`` with these arguments.

    A hook, ``__call__`` or a decorator may change the arguments: then the call itself tells.
    """
    hooks = model._forward_pre_hooks or nn.modules.module._global_forward_pre_hooks
    if hooks or type(model).__call__ is not nn.Module.__call__ or not inspect.ismethod(model.forward):
        return
    signature = inspect.signature(model.forward, follow_wrapped=False)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "no arguments"
        advice = "return all of them from get_inputs(), or give one with --input NAME=f32[64,16,256]"
        where = _definition(model.forward.__func__, file) or file.shown
        raise FuseError(f"{where}: the inputs do not fit forward, which takes {takes}: {error}; {advice}") from None


def _called(file: ModelFile, name: str, namespace: Mapping[str, Any]) -> Any:
    with blame(file, f"calling {name}()", _definition(namespace[name], file)):
        return namespace[name]()
