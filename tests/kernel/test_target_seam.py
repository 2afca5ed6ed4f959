"""The kernel language knows no device: C++ stands in its own folders, and an operator is one recipe for all targets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.kernel import recipes
from fuse.kernel.expressions import fn, select
from fuse.kernel.lower import Kernel, lower
from fuse.kernel.recipes import Call, recipe
from fuse.kernel.values import Value
from fuse.testing import assert_fuses
from tests.kernel.test_python_target import loops_of, run

ROOT = Path(fuse.__file__).parent
CPP = re.compile(
    r"#include|#pragma|\bu?int\d+_t\b|\bconst \w+ \*|_cast<|extern \"C\"|\bstd::|\bfuse_\w+<|^\s*\w+ \w+ = .*;$"
    r"|\breturn .*;|\) \{$|\b(template|typename|constexpr|volatile|alignas)\b",
    re.MULTILINE,
)


def texts(file: Path) -> Iterator[str]:
    """The strings of a Python file that are no docstrings."""
    tree = ast.parse(file.read_text())
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


def cpp_in(*folders: Path) -> list[tuple[Path, str]]:
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return [(file, text) for file in files for text in texts(file) if CPP.search(text)]


def test_no_cpp_stands_outside_of_its_folders() -> None:
    """Reports are pages, which have styles and scripts, not kernels."""
    own = (ROOT / "kernel" / "cpu", ROOT / "runtime", ROOT / "report")
    found = cpp_in(ROOT, ROOT.parent / "passes")
    assert [(file, text) for file, text in found if not any(map(file.is_relative_to, own))] == []


def test_cpp_would_be_found() -> None:
    assert len(cpp_in(ROOT / "kernel" / "cpu")) > 50


def names_the_cpu(file: Path) -> bool:
    """Whether the code of a file asks for the device by its name, or imports its kernels."""
    imports = (node.module or "" for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom))
    return "cpu" in texts(file) or any(module.startswith("fuse.kernel.cpu") for module in imports)


def test_the_page_on_targets_names_each_file_that_knows_the_cpu() -> None:
    page = (ROOT.parent / "docs" / "adding-a-target.md").read_text()
    layers = [ROOT / name for name in ("graph", "cost", "rewrite", "kernel", "loops", "gradients", "runtime")]
    files = [file for layer in (*layers, ROOT.parent / "passes") for file in sorted(layer.rglob("*.py"))]
    found = [file for file in files if not file.is_relative_to(ROOT / "kernel" / "cpu") and names_the_cpu(file)]
    assert len(found) > 20
    assert [file for file in found if not re.search(rf"\b{file.name}`", page)] == []


@pytest.fixture
def own_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes that a test registers are forgotten after it."""
    monkeypatch.setattr(recipes, "_RECIPES", dict(recipes._RECIPES))


class Steps(nn.Module):
    def forward(self, x: Tensor, at_zero: Tensor) -> Tensor:
        return torch.heaviside(x * 2, at_zero) + 1


@pytest.mark.usefixtures("own_recipes")
def test_a_recipe_is_all_that_an_operator_needs() -> None:
    """Passes, C++, the Python target and the reference take it from there."""
    x, at_zero = torch.tensor([-1.0, -0.0, 0.0, 2.0, torch.nan, torch.inf]), torch.tensor(0.25)
    assert fuse.show(Steps(), (x, at_zero)).after.launches == 3

    @recipe("heaviside")
    def heaviside(call: Call) -> Value:
        return call.map(lambda a, b, one: select(fn.equal(a, 0), b, select(a > 0, one, 0)), "self", "values", 1)

    assert_fuses(Steps(), x, at_zero, launches=1)
    body, inputs = loops_of(Steps(), x, at_zero)
    out = torch.empty_like(x)
    assert run(body, [*inputs, out])
    assert torch.equal(out, Steps()(x, at_zero))


def test_names_that_cpp_keeps_are_not_those_of_the_graph() -> None:
    """An operator called ``and``, inputs called as types and as the kernel's own arguments."""

    class Named(nn.Module):
        def forward(self, int_1: Tensor, args: Tensor, out0: Tensor) -> Tensor:
            return int_1 * args + out0.logical_and(args)

    x = torch.randn(4)
    graph = fuse.capture(Named(), (x, x + 1, x > 0))
    kernel = lower(graph)
    assert isinstance(kernel, Kernel)
    named = set(re.findall(r"const \w+ \*(?:\w+ )*(\w+) =", kernel.source))
    assert named == {"int_", "args_", "out0_"}
    assert_fuses(Named(), x, x + 1, x > 0, launches=1)
