"""Replace a model's example inputs: ``--input NAME=f32[64,16,256]``.

NAME is a parameter of ``forward`` or a position, counted from 0. Floating-point inputs are drawn from the normal
distribution; integers from the range of the values they replace, so that token numbers stay inside the vocabulary.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fuse.errors import FuseError

DTYPES: Mapping[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}

_REQUEST = re.compile(r"(?P<name>\w+)=(?P<dtype>\w+)\[(?P<shape>(\d+(,\d+)*)?)\]")

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class InputRequest:
    """One ``--input``: ``name`` is a parameter's name or a position in digits."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def parse_input(text: str) -> InputRequest:
    """Read ``NAME=dtype[sizes]``; raises ``FuseError`` where it is not of that form.

    >>> parse_input("tokens=i64[2, 32]")
    InputRequest(name='tokens', dtype=torch.int64, shape=(2, 32))
    >>> parse_input("0=f32[]").shape
    ()
    """
    match = _REQUEST.fullmatch("".join(text.split()))
    if match is None or not (match["name"].isidentifier() or match["name"].isdecimal()):
        raise FuseError(f"cannot read --input {text!r}; write NAME=DTYPE[SIZES], for example --input x=f32[64,16,256]")
    if match["dtype"] not in DTYPES:
        raise FuseError(f"--input {text!r} has an unknown dtype {match['dtype']!r}; use one of {', '.join(DTYPES)}")
    shape = tuple(int(size) for size in match["shape"].split(",") if size)
    return InputRequest(match["name"], DTYPES[match["dtype"]], shape)


def replace_inputs(
    requests: Sequence[InputRequest], forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> CallArguments:
    """The call's arguments with each request's tensor in its place; an optional argument not given so far is added.

    A tensor is made on the device of the one it replaces, under whatever tensor mode is active. Raises ``FuseError``
    where ``forward`` has no such parameter.

    >>> def forward(x, scale=1.0): ...
    >>> args, kwargs = replace_inputs([parse_input("scale=f32[3]")], forward, [torch.zeros(3)], {})
    >>> len(args), kwargs["scale"].shape
    (1, torch.Size([3]))
    """
    positional, named = list(args), dict(kwargs)
    for request in requests:
        key = _argument_key(request.name, forward, len(positional), named)
        if isinstance(key, str):
            named[key] = _example(request, named.get(key))
        elif key < len(positional):
            positional[key] = _example(request, positional[key])
        else:
            positional.append(_example(request, None))
    return tuple(positional), named


def _argument_key(name: str, forward: Callable[..., Any], given: int, named: Mapping[str, Any]) -> int | str:
    """The position (at most ``given``) or keyword of the argument called ``name``."""
    parameters = inspect.signature(forward).parameters
    kinds = {kind: [p.name for p in parameters.values() if p.kind is kind] for kind in inspect._ParameterKind}
    positional = kinds[inspect.Parameter.POSITIONAL_ONLY] + kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if name in named:
        return name
    if name.isdecimal():
        position = int(name)
        if position < given or (position == given and kinds[inspect.Parameter.VAR_POSITIONAL]):
            return position
        if position >= len(positional):
            raise FuseError(
                f"--input {name}: forward takes {len(positional)} inputs, counted from 0: {_listed(positional)}"
            )
        name = positional[position]
    if name in positional and positional.index(name) < given:
        return positional.index(name)
    if name in kinds[inspect.Parameter.POSITIONAL_ONLY] and positional.index(name) == given:
        return given
    if name in positional or name in kinds[inspect.Parameter.KEYWORD_ONLY] or kinds[inspect.Parameter.VAR_KEYWORD]:
        return name
    known = positional + kinds[inspect.Parameter.KEYWORD_ONLY]
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]!r}?" if close else f"it has {_listed(known)}"
    raise FuseError(f"--input {name}: forward has no such parameter; {advice}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _example(request: InputRequest, replaced: object) -> torch.Tensor:
    device = replaced.device if isinstance(replaced, torch.Tensor) else None
    if request.dtype.is_floating_point:
        return torch.randn(request.shape, dtype=request.dtype, device=device)
    if request.dtype is torch.bool:
        return torch.randint(0, 2, request.shape, dtype=request.dtype, device=device)
    limits = torch.iinfo(request.dtype)
    lowest, highest = (min(max(bound, limits.min), limits.max - 1) for bound in _integer_range(replaced))
    return torch.randint(lowest, highest + 1, request.shape, dtype=request.dtype, device=device)


def _integer_range(replaced: object) -> tuple[int, int]:
    """Smallest and largest value of an integer tensor; 0 and 1 if it has no values."""
    if not isinstance(replaced, torch.Tensor) or isinstance(replaced, FakeTensor) or replaced.numel() == 0:
        return 0, 1
    if replaced.is_floating_point() or replaced.is_complex() or replaced.dtype is torch.bool:
        return 0, 1
    return int(replaced.min()), int(replaced.max())
