"""A setting replaces a constant wherever the module assigns it, and nothing else."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from fuse.errors import FuseError
from fuse.graph.loading.settings import apply_settings, parse_setting


def values(source: str, *settings: str) -> dict[str, Any]:
    """The names that the source defines once the settings are applied."""
    tree = apply_settings(ast.parse(source), [parse_setting(text) for text in settings], "model.py")
    names: dict[str, Any] = {}
    exec(compile(tree, "model.py", "exec"), names)
    return names


def refusal(source: str, *settings: str) -> str:
    with pytest.raises(FuseError) as caught:
        values(source, *settings)
    return str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "size = 1",
        "size: int = 1",
        "size = other = 1",
        "size, other = 1, 2",
        "(other, [*size]) = 1, (2, 3)",
        "size = 1\nsize += 1",
        "size = 1\nsize = size + 1",
        "size = int('not a number')",
        "if True:\n    size = 1",
        "try:\n    size = 1\nfinally:\n    pass",
        "for _ in range(3):\n    size = 1",
    ],
)
def test_module_level_assignments_of_every_form_are_replaced(source: str) -> None:
    assert values(f"{source}\ndouble = 2 * size", "size=4")["double"] == 8


def test_the_other_parts_of_a_tuple_keep_their_values() -> None:
    assert values("size, other = 1, 2", "size=4")["other"] == 2


def test_functions_and_classes_keep_their_own_names() -> None:
    names = values("size = 1\ndef f():\n    size = 9\n    return size\nclass C:\n    size = 9", "size=4")
    assert (names["size"], names["f"](), names["C"].size) == (4, 9, 9)


@pytest.mark.parametrize(
    "source", ["def f():\n    size = 1", "class C:\n    size = 1", "size: int", "def size(): pass", "import os as size"]
)
def test_names_that_are_no_constants_cannot_be_set(source: str) -> None:
    assert refusal(source, "size=4") == "model.py sets no module-level constant 'size'; it has none"


@pytest.mark.parametrize(
    ("text", "value"), [("large", "large"), ("'large'", "large"), ("-2.5", -2.5), ("(1, 2)", (1, 2)), ("None", None)]
)
def test_values_are_literals_and_bare_words_stand_for_strings(text: str, value: object) -> None:
    assert values("size = 'small'", f"size={text}")["size"] == value


def test_the_last_of_two_settings_of_one_name_counts() -> None:
    assert values("size = 1", "size=2", "size=3")["size"] == 3


def test_an_unknown_name_is_answered_with_a_suggestion_or_the_names_there_are() -> None:
    source = "features = 3\nbatch_size = 2\n_hidden = 1"
    assert refusal(source, "feature=4") == (
        "model.py sets no module-level constant 'feature'; did you mean 'features'?"
    )
    assert refusal(source, "x=4") == "model.py sets no module-level constant 'x'; it has features, batch_size"


@pytest.mark.parametrize("text", ["features", "2x=4", "=4", "a.b=4"])
def test_settings_without_a_name_and_a_value_are_refused(text: str) -> None:
    assert refusal("", text) == f"cannot read --set {text!r}; write NAME=VALUE, for example --set batch_size=4"


@pytest.mark.parametrize("value", ["four", "true", "open('x')", "", "1 +", "[1", "((" * 200])
def test_values_that_are_no_literals_are_refused(value: str) -> None:
    message = f"cannot read the value of --set size={value}; write a Python literal, such as 4, 0.5 or True"
    assert refusal("size = 1", f"size={value}") == message
