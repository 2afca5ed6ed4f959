"""Run a float32 model in a narrower dtype, except operators that are to stay in float32.

    x, weights (float32)  --cast at their first use-->  operators in bf16  -->  result
                                                        a kept operator: operands widened, its result stays float32
                                                                         until an operator that is not kept reads it

The weights stay float32, so that an optimizer and ``GradScaler`` work on float32. Tensors that ``forward`` creates or
casts keep the dtype that it asks for. With nothing kept, ``bf16`` and ``f16`` give the results of ``model.to(dtype)``.
``autocast`` follows torch's lists of operators; kept operators run outside of autocast.

The mode for torch functions works above autograd, in eager mode and during a capture.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from fuse.devices import autocast, without_autocast
from fuse.errors import FuseError
from fuse.graph.sources import user_line

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "autocast": torch.bfloat16}

CASTS = frozenset(["to", "type", "type_as", "float", "half", "bfloat16", "double"])
"""Functions with which a model asks for a dtype."""

_MOVE_NAMES = """
    T mT H mH __getitem__ broadcast_to chunk clone contiguous detach diagonal expand expand_as flatten gather
    index_select movedim narrow permute ravel repeat reshape reshape_as select split squeeze swapaxes swapdims t take
    tensor_split tile transpose unbind unflatten unfold unsqueeze view view_as
"""
_MOVES = frozenset(_MOVE_NAMES.split())
"""Functions that return elements unchanged: the result of a wide operand stays wide."""

_QUESTIONS = """
    __deepcopy__ __format__ __hash__ __len__ __repr__ _is_view data_ptr dim element_size get_device is_complex
    is_contiguous is_floating_point is_same_size is_tensor ndimension nelement numel register_hook requires_grad_
    retain_grad size storage_offset stride untyped_storage
"""
_ASKS = frozenset(_QUESTIONS.split())
"""Functions that read no values."""

_NORMS_WITH_STATISTICS = frozenset(["batch_norm", "instance_norm"])
"""Functions that may write to their second and third operands, which must keep their dtype."""


@dataclass(frozen=True, repr=False)
class Precision:
    """The dtype that a model runs in, and the operators that stay in float32; prints as the code that makes it.

    ``dtype`` is ``bf16``, ``f16`` or ``autocast`` (torch's rules, bfloat16). Each of ``keep`` names a line
    (``"model.py:41"``) or one function there (``"model.py:41:softmax"``). ``relaxed`` lets ``fuse.compile`` leave out
    roundings that a later cast undoes: nearer to float32, and not what eager gives bit for bit.

    Raises:
        FuseError: no such dtype, or an entry of ``keep`` that names no line.

    >>> Precision("bf16", keep=("model.py:41:softmax",))
    fuse.Precision('bf16', keep=('model.py:41:softmax',))
    """

    dtype: str = "bf16"
    keep: tuple[str, ...] = ()
    relaxed: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise FuseError(f"no precision {self.dtype!r}; there are {', '.join(DTYPES)}")
        for entry in self.keep:
            if len(entry.split(":")) < 2 or not entry.split(":")[1].isdigit():
                raise FuseError(f"keep takes lines as 'model.py:41' or 'model.py:41:softmax', not {entry!r}")

    def __repr__(self) -> str:
        relaxed = ", relaxed=True" if self.relaxed else ""
        return f"fuse.Precision({self.dtype!r}, keep={self.keep!r}{relaxed})"

    @property
    def narrow(self) -> torch.dtype:
        """The dtype that operators run in."""
        return DTYPES[self.dtype]


def in_precision(model: nn.Module, precision: Precision, watch: Watch | None = None) -> nn.Module:
    """A module that runs the calls of ``model`` in ``precision``; it shares all state with ``model``.

    ``watch`` notes what the calls do.

    >>> model = nn.Linear(2, 2)
    >>> in_precision(model, Precision("bf16"))(torch.ones(1, 2)).dtype, model.weight.dtype
    (torch.bfloat16, torch.float32)
    """
    kind = type(model)
    seen = watch or Watch()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with applied(precision, self, (args, kwargs), seen):
            result = kind.__call__(self, *args, **kwargs)
        if absent := [one for one in precision.keep if one not in seen.kept and one not in seen.absent]:
            seen.absent.update(absent)
            warnings.warn(f"nothing ran at {', '.join(absent)}, which is to stay in float32", stacklevel=2)
        return result

    def copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        inner: nn.Module = object.__new__(kind)
        object.__setattr__(inner, "__dict__", self.__dict__)
        return in_precision(copy.deepcopy(inner, memo), precision)

    members = {"__call__": call, "__deepcopy__": copied, "__module__": kind.__module__}
    narrowed: nn.Module = object.__new__(type(kind.__name__, (kind,), members))
    object.__setattr__(narrowed, "__dict__", model.__dict__)
    return narrowed


class Watch:
    """Notes on the calls so far.

    ``sites``: the functions that computed; ``casts``: the lines where the model asks for a dtype; both in the order of
    their first call. ``kept``: the entries of ``keep`` that applied; ``absent``: those that did not, and were reported.
    """

    def __init__(self) -> None:
        self.sites: dict[str, None] = {}
        self.casts: dict[str, None] = {}
        self.kept: set[str] = set()
        self.absent: set[str] = set()


@contextlib.contextmanager
def applied(precision: Precision, model: nn.Module, arguments: Any, watch: Watch) -> Iterator[None]:
    """A context for one call of ``model`` with ``arguments``, run in ``precision``."""
    given = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(arguments)]
    wide = [t for t in given if isinstance(t, Tensor) and t.dtype == torch.float32]
    if precision.dtype == "autocast":
        with autocast(torch.bfloat16), _Autocast(precision, (), watch):
            yield
    else:
        with _Narrowing(precision, wide, watch):
            yield


class _Narrowing(TorchFunctionMode):
    """The mode that narrows operands.

    Tensors in ``wide`` are float32 because they were so at first, or were kept so; operators that are not kept narrow
    them.
    """

    def __init__(self, precision: Precision, wide: Any, watch: Watch) -> None:
        super().__init__()
        self.narrow = precision.narrow
        self.kept = frozenset(precision.keep)
        self.watch = watch
        self.wide = WeakTensorKeyDictionary()
        self.narrowed = WeakTensorKeyDictionary()
        for tensor in wide:
            self.wide[tensor] = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name == "dtype" and args[0] in self.wide:
            return self.narrow
        if name in _ASKS or _is_attribute(func):
            return self._moved(func, args, kwargs) if name in _MOVES else func(*args, **kwargs)
        if name in _MOVES:
            return self._moved(func, args, kwargs)
        line = user_line()
        site = f"{line}:{name}"
        self.watch.sites[site] = None
        if name in CASTS:
            self.watch.casts[line] = None
        entries = self.kept.intersection((line, site))
        self.watch.kept.update(entries)
        return self._run(func, name, args, kwargs, bool(entries))

    def _run(self, func: Any, name: str, args: Any, kwargs: Any, kept: bool) -> Any:
        if "out" in kwargs or _writes(name):  # the written tensor decides the dtype
            return func(args[0], *self._narrowed(args[1:]), **kwargs) if args else func(**kwargs)
        if name in _NORMS_WITH_STATISTICS:
            return func(*(args if kept else self._narrowed(args[:1]) + args[1:]), **kwargs)
        if not kept:
            return func(*self._narrowed(args), **self._narrowed(kwargs))
        if name in CASTS:
            return self._uncast(func, args, kwargs)
        return self._tagged(func(*self._widened(args), **self._widened(kwargs)))

    def _uncast(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a kept cast: float32 instead of the narrow dtype."""
        result = func(*args, **kwargs)
        return self._tagged(args[0].to(torch.float32)) if result.dtype == self.narrow else result

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        operands = pytree.tree_leaves((args, kwargs))
        return self._tagged(result) if any(isinstance(t, Tensor) and t in self.wide for t in operands) else result

    def _tagged(self, result: Any) -> Any:
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.wide[tensor] = True
        return result

    def _narrowed(self, values: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._narrow, values)

    def _narrow(self, tensor: Tensor) -> Tensor:
        if tensor not in self.wide or tensor.dtype != torch.float32:
            return tensor
        if torch.is_grad_enabled():  # a cast for each use: the gradients of all uses are added up in float32
            return tensor.to(self.narrow)
        version, found = self.narrowed.get(tensor, (None, None))
        if not isinstance(found, Tensor) or version != tensor._version:
            found = tensor.to(self.narrow)
            self.narrowed[tensor] = (tensor._version, found)
        return found

    def _widened(self, values: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.float() if t.dtype == self.narrow else t, values)


class _Autocast(_Narrowing):
    """torch's autocast; kept operators run outside of it."""

    def _run(self, func: Any, name: str, args: Any, kwargs: Any, kept: bool) -> Any:
        if not kept or "out" in kwargs or _writes(name) or name in _NORMS_WITH_STATISTICS:
            return func(*args, **kwargs)
        with without_autocast():
            if name in CASTS:
                return self._uncast(func, args, kwargs)
            return func(*self._widened(args), **self._widened(kwargs))


def _name(func: Any) -> str:
    """The name by which the user calls the function: ``softmax``, ``add`` for ``+``, ``shape`` for the attribute."""
    if _is_attribute(func):
        return str(getattr(func.__self__, "__name__", ""))
    name = str(getattr(func, "__name__", ""))
    plain = name.removeprefix("__").removesuffix("__")
    return plain if name.startswith("__") and plain in _OPERATORS else name


_OPERATORS = frozenset(
    ["add", "sub", "mul", "truediv", "matmul", "pow", "radd", "rsub", "rmul", "rtruediv", "rmatmul", "rpow", "neg"]
)


def _is_attribute(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")


def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.startswith("__i") and name != "__invert__") or _is_in_place(name)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
