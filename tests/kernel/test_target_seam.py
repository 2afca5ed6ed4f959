"""The kernel language knows no device: C++ stands in its own folders, and an operator is one recipe for all targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fuse
from fuse.kernel.arithmetic.expressions import fn, select
from fuse.kernel.kernel import Declined, Kernel
from fuse.kernel.lower import lower, target_for
from fuse.kernel.recipes import registry as recipes
from fuse.kernel.recipes.registry import Call, recipe
from fuse.kernel.target import TARGETS
from fuse.kernel.values import Value
from fuse.testing import assert_fuses
from tests.kernel.test_python_target import loops_of, run
from tests.test_devices import texts

ROOT = Path(fuse.__file__).parent
CPP = re.compile(
    r"#include|#pragma|\bu?int\d+_t\b|\bconst \w+ \*|_cast<|extern \"C\"|\bstd::|\bfuse_\w+<|^\s*\w+ \w+ = .*;$"
    r"|\breturn .*;|\) \{$|\b(template|typename|constexpr|volatile|alignas)\b",
    re.MULTILINE,
)


def cpp_in(*folders: Path) -> list[tuple[Path, str]]:
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return [(file, text) for file in files for text in texts(file) if CPP.search(text)]


def test_no_cpp_stands_outside_of_its_folders() -> None:
    """Reports are pages, which have styles and scripts, not kernels."""
    own = (ROOT / "kernel" / "cpu", ROOT / "runtime" / "cpu", ROOT / "report")
    found = cpp_in(ROOT, ROOT.parent / "passes")
    assert [(file, text) for file, text in found if not any(map(file.is_relative_to, own))] == []


def test_cpp_would_be_found() -> None:
    assert len(cpp_in(ROOT / "kernel" / "cpu")) > 50


def test_values_on_several_devices_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where both devices have kernels: each reads memory of its own only."""
    monkeypatch.setattr("fuse.kernel.lower.TARGETS", {**TARGETS, "meta": TARGETS["cpu"]})
    here, there = torch.ones(2), torch.ones(2, device="meta")
    assert not isinstance(target_for([here, here]), Declined)
    reason = target_for([here, there])
    assert isinstance(reason, Declined)
    assert "cpu and meta" in reason.reason


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
