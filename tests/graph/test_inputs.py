"""A requested input has the dtype and sizes asked for and takes its parameter's place in the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fuse.errors import FuseError
from fuse.graph.loading.inputs import DTYPES, parse_input, replace_inputs


def forward(x: Tensor, scale: Tensor, *, flag: bool = False) -> None: ...


def positional_only(x: Tensor, y: Tensor, /) -> None: ...


def open_ended(*layers: Tensor, **options: Tensor) -> None: ...


def replaced(text: str, function: Callable[..., None], *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Shapes of the arguments, by position and by name."""
    args, kwargs = replace_inputs([parse_input(text)], function, args, kwargs)
    return [tuple(value.shape) for value in args], {name: tuple(value.shape) for name, value in kwargs.items()}


X = torch.zeros(3)


@pytest.mark.parametrize(
    ("text", "function", "args", "kwargs", "expected"),
    [
        ("x=f32[2]", forward, (X, X), {}, ([(2,), (3,)], {})),
        ("1=f32[2]", forward, (X, X), {}, ([(3,), (2,)], {})),
        ("scale=f32[2]", forward, (X,), {}, ([(3,)], {"scale": (2,)})),
        ("1=f32[2]", forward, (X,), {}, ([(3,)], {"scale": (2,)})),
        ("scale=f32[2]", forward, (X,), {"scale": X}, ([(3,)], {"scale": (2,)})),
        ("0=f32[2]", forward, (), {"x": X}, ([], {"x": (2,)})),
        ("flag=bool[]", forward, (X,), {}, ([(3,)], {"flag": ()})),
        ("y=f32[2]", positional_only, (X,), {}, ([(3,), (2,)], {})),
        ("1=f32[2]", open_ended, (X,), {}, ([(3,), (2,)], {})),
        ("mask=f32[2]", open_ended, (X,), {}, ([(3,)], {"mask": (2,)})),
    ],
)
def test_an_input_takes_the_place_of_its_parameter(
    text: str, function: Any, args: Any, kwargs: Any, expected: Any
) -> None:
    assert replaced(text, function, *args, **kwargs) == expected


def test_the_arguments_given_are_left_alone() -> None:
    args, kwargs = [X], {"scale": X}
    replace_inputs([parse_input("x=f32[2]"), parse_input("scale=f32[2]")], forward, args, kwargs)
    assert args[0] is X
    assert kwargs["scale"] is X


@pytest.mark.parametrize("short", DTYPES)
@pytest.mark.parametrize("fake", [True, False])
def test_every_dtype_and_shape_can_be_made(short: str, fake: bool) -> None:
    mode = FakeTensorMode()
    for sizes in ([], [4], [2, 0, 3]):
        if fake:
            with mode:
                (x,), _ = replace_inputs([parse_input(f"x={short}{sizes}")], forward, [torch.zeros(3)], {})
        else:
            (x,), _ = replace_inputs([parse_input(f"x={short}{sizes}")], forward, [torch.zeros(3)], {})
        assert x.dtype == DTYPES[short]
        assert list(x.shape) == sizes
        assert isinstance(x, FakeTensor) == fake


@pytest.mark.parametrize(
    ("old", "short", "lowest", "highest"),
    [
        (torch.tensor([990, 999]), "i64", 990, 999),
        (torch.tensor([990, 999]), "i8", 126, 126),
        (torch.tensor([-3, 2]), "u8", 0, 2),
        (torch.tensor([0.5, 9.5]), "i64", 0, 1),
        (torch.tensor([True]), "i64", 0, 1),
        (torch.tensor([5]), "bool", 0, 1),
        (None, "i32", 0, 1),
    ],
)
def test_integers_stay_in_the_range_of_the_values_they_replace(
    old: Tensor | None, short: str, lowest: int, highest: int
) -> None:
    torch.manual_seed(0)
    (x,), _ = replace_inputs([parse_input(f"x={short}[500]")], forward, [old], {})
    assert (int(x.min()), int(x.max())) == (lowest, highest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y=f32[2]", "--input y: forward has no such parameter; it has x, scale, flag"),
        ("scal=f32[2]", "--input scal: forward has no such parameter; did you mean 'scale'?"),
        ("2=f32[2]", "--input 2: forward takes 2 inputs, counted from 0: x, scale"),
        ("x=f33[2]", "--input 'x=f33[2]' has an unknown dtype 'f33'; use one of " + ", ".join(DTYPES)),
        *(
            (text, f"cannot read --input {text!r}; write NAME=DTYPE[SIZES], for example --input x=f32[64,16,256]")
            for text in ("x=f32[2,-1]", "x=f32[2,]", "x=f32", "3x=f32[2]", "=f32[2]", "x", "")
        ),
    ],
)
def test_inputs_that_cannot_be_read_or_placed_are_refused(text: str, message: str) -> None:
    with pytest.raises(FuseError) as caught:
        replaced(text, forward, X)
    assert str(caught.value) == message
