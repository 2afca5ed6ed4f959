"""Lead Python's reads of fake tensors to the reader of a capture.

    bool(t)   t.item()   t.tolist()   float(t)   t.numpy()      ->   reader.truth_of(t), reader.item(t), ...
    t[i]                                                        ->   positions.looked_up(t, i)
    t[i] = x                                                    ->   positions.stored(t, i, x)
    torch.cond(t, f, g)                                         ->   f or g, run as plain Python

The methods of fake tensors are replaced while a call is recorded, for the recording thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch._higher_order_ops import utils as _higher_order
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fuse.graph.numbers.read_numbers import known
from fuse.graph.patches.control_flow import run_plainly
from fuse.graph.patches.patched import in_this_thread, patched
from fuse.graph.values.positions import Positions
from fuse.graph.values.tensor_indices import windows_in
from fuse.graph.values.value_reads import Reader
from fuse.graph.values.whole_slices import sliced

_CONDITIONAL = "_hop_compile_and_call"
"""The function that runs ``torch.cond`` and similar operators. torch 2.11 lacks it; there they cannot be captured."""


@contextlib.contextmanager
def reads_followed(reader: Reader, positions: Positions) -> Iterator[None]:
    """A context in which ``reader`` handles this thread's reads of fake tensors' values, and ``positions`` indexing by
    them."""
    thread = threading.get_ident()

    def follows(tensor: Any) -> bool:
        return threading.get_ident() == thread and not reader.closed and tensor.fake_mode is reader.fake_mode

    def asked(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(FakeTensor, name)

        def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if follows(tensor) and (tensor.numel() == 1 or name in _OF_ANY_SIZE):
                return answer(reader, tensor, *args, **kwargs)
            return original(tensor, *args, **kwargs)

        return method

    get: Any = FakeTensor.__getitem__
    put: Any = FakeTensor.__setitem__

    def part(tensor: Any, index: Any) -> Any:
        if (type(index) not in (int, slice) or windows_in(index)) and follows(tensor):
            found = positions.looked_up(tensor, index, get)
            found = sliced(tensor, index, get) if found is None else found
            if found is not None:
                return found
        return get(tensor, index)

    def store(tensor: Any, index: Any, value: Any) -> None:
        if not follows(tensor) or not positions.stored(tensor, index, value, get):
            put(tensor, index, value)

    # Before torch 2.13 these functions compile themselves here, and cannot be followed.
    conditional = _CONDITIONAL if hasattr(_higher_order, _CONDITIONAL) else "setup_compilation_env"
    compiled: Any = getattr(_higher_order, conditional)

    def followed(function: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if kwargs:
            return compiled(function, args, kwargs) if function else compiled()
        with reader.refusing():
            return run_plainly(function, args)

    answers = {name: asked(name, answer) for name, answer in _ANSWERS.items()}
    answers |= {"__getitem__": part, "__setitem__": store}
    with patched(FakeTensor, answers), patched(_higher_order, {conditional: in_this_thread(followed, compiled)}):
        yield
    reader.close()


def _numpy(reader: Reader, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A read-only array: a write to it would not reach the tensor."""
    if tensor.requires_grad and not kwargs.get("force"):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    values = reader.values(tensor)
    with _disable_current_modes():
        array = values.numpy()
    array.flags.writeable = False
    return array


_ANSWERS: dict[str, Callable[..., Any]] = {
    "__bool__": Reader.truth_of,
    "item": Reader.item,
    "tolist": Reader.listed,
    "__float__": lambda reader, tensor: float(reader.item(tensor, plain=True)),
    "__int__": Reader.whole,
    "__index__": Reader.whole,
    "__complex__": lambda reader, tensor: complex(reader.item(tensor, plain=True)),
    "__format__": lambda reader, tensor, spec: format(known(reader.item(tensor)), spec),
    "numpy": _numpy,
    "__array__": lambda reader, tensor, dtype=None, **_: (
        _numpy(reader, tensor) if dtype is None else _numpy(reader, tensor).astype(dtype, copy=False)
    ),
}
_OF_ANY_SIZE = frozenset({"tolist", "numpy", "__array__"})
