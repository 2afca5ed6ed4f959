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
from fuse import devices
from fuse.devices import device_of
from fuse.kernel import recipes
from fuse.kernel.expressions import fn, select
from fuse.kernel.lower import Declined, Kernel, lower, target_for
from fuse.kernel.recipes import Call, recipe
from fuse.kernel.target import TARGETS
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
    own = (ROOT / "kernel" / "cpu", ROOT / "runtime" / "cpu", ROOT / "report")
    found = cpp_in(ROOT, ROOT.parent / "passes")
    assert [(file, text) for file, text in found if not any(map(file.is_relative_to, own))] == []


def test_cpp_would_be_found() -> None:
    assert len(cpp_in(ROOT / "kernel" / "cpu")) > 50


OWN = (ROOT / "kernel" / "cpu", ROOT / "runtime" / "cpu")
DEVICE = re.compile(r"\bcpu\b|_cpu\b|\bcuda\b")


def shared_files() -> list[Path]:
    """The files that all devices share: the layers from capture to programs, and the passes."""
    layers = [ROOT / name for name in ("graph", "cost", "rewrite", "kernel", "loops", "gradients", "runtime", "check")]
    files = [file for layer in (*layers, ROOT.parent / "passes") for file in sorted(layer.rglob("*.py"))]
    return [file for file in files if not any(map(file.is_relative_to, OWN))]


def names_a_device(file: Path) -> list[str]:
    """What the code of a file calls a device, or imports of one: strings, attributes and modules."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    imported = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    attributes = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    return [text for text in (*texts(file), *imported, *attributes) if DEVICE.search(text)]


def asks_for_the_host(file: Path) -> bool:
    """Whether a file takes ``HOST`` or ``is_host`` from :mod:`fuse.devices`."""
    nodes = ast.walk(ast.parse(file.read_text()))
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "fuse.devices"]
    return any(alias.name in ("HOST", "is_host") for node in froms for alias in node.names)


def named_under(heading: str) -> set[str]:
    """The files in the table of a section of the page on targets."""
    page = (ROOT.parent / "docs" / "adding-a-target.md").read_text()
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return set(re.findall(r"`([\w/]+\.py)`", "\n".join(rows)))


def test_no_file_but_those_of_a_device_names_one() -> None:
    """Besides the names of ATen's operators, and the table of profiles."""
    found = {str(file.relative_to(ROOT.parent)): names for file in shared_files() if (names := names_a_device(file))}
    assert found == {
        "fuse/cost/profiles.py": ["cpu"],
        "fuse/graph/compact.py": ["dtype device requires_grad is_leaf layout grad_fn is_cpu is_cuda"],
        "fuse/kernel/attention.py": ["_scaled_dot_product_flash_attention_for_cpu"],
        "fuse/rewrite/constants.py": ["cpu"],
        "passes/fuse_attention.py": ["_scaled_dot_product_flash_attention_for_cpu"],
    }


def test_the_page_on_targets_names_each_file_that_asks_for_the_host() -> None:
    found = {str(file.relative_to(ROOT.parent)) for file in shared_files() if asks_for_the_host(file)}
    assert found == named_under("What asks whether a tensor is on the processor")


def test_a_file_that_knows_a_device_would_be_found(tmp_path: Path) -> None:
    lines = (
        'x = torch.empty(1, device="cpu")',
        "from fuse.runtime.cpu.blas import product",
        "import fuse.kernel.cpu.emit",
        "y = x.is_cuda or x.cpu()",
        'torch.autocast("cuda")',
    )
    for line in lines:
        (tmp_path / "one.py").write_text(line)
        assert names_a_device(tmp_path / "one.py"), line
    (tmp_path / "one.py").write_text("from fuse.devices import has_kernels, is_host")
    assert not names_a_device(tmp_path / "one.py")
    assert asks_for_the_host(tmp_path / "one.py")


def test_values_on_several_devices_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where both devices have kernels: each reads memory of its own only."""
    monkeypatch.setattr("fuse.kernel.lower.TARGETS", {**TARGETS, "meta": TARGETS["cpu"]})
    here, there = torch.ones(2), torch.ones(2, device="meta")
    assert not isinstance(target_for([here, here]), Declined)
    reason = target_for([here, there])
    assert isinstance(reason, Declined)
    assert "cpu and meta" in reason.reason


def test_autocast_is_told_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DEVICES", ("cpu", "cuda"))
    off = devices.autocast_modes()
    with torch.autocast("cpu", torch.float16):
        assert devices.autocast_modes() == (True, torch.float16, *off[2:])
        with devices.without_autocast():
            assert devices.autocast_modes()[0] is off[0] is False
    assert len(off) == 4


def test_a_graph_computes_on_the_device_that_is_not_the_host() -> None:
    graph = fuse.capture(nn.Tanh(), (torch.ones(2),))
    assert device_of(graph) == "cpu"
    graph.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.ones(2, device="meta")
    assert device_of(graph) == "meta"


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
