"""One file names devices: all others ask it, the target or the runtime, and the page on targets says which ask what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fuse
from fuse import devices
from fuse.devices import device_of

ROOT = Path(fuse.__file__).parent
OWN = (ROOT / "kernel" / "cpu", ROOT / "runtime" / "cpu")
DEVICE = re.compile(r"\bcpu\b|_cpu\b|\bcuda\b")


def texts(file: Path) -> Iterator[str]:
    """The strings of a Python file that are no docstrings."""
    tree = ast.parse(file.read_text())
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


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
        "fuse/graph/values/masked_elements.py": ["dtype device requires_grad is_leaf layout grad_fn is_cpu is_cuda"],
        "fuse/kernel/recipes/attention.py": ["_scaled_dot_product_flash_attention_for_cpu"],
        "fuse/rewrite/constants.py": ["cpu"],
        "passes/fuse_attention.py": ["_scaled_dot_product_flash_attention_for_cpu"],
    }


def test_the_page_on_targets_names_each_file_that_asks_for_the_host() -> None:
    found = {str(file.relative_to(ROOT.parent)) for file in shared_files() if asks_for_the_host(file)}
    assert found == named_under("Code that asks whether a tensor is on the host")


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


@pytest.mark.parametrize("training", [False, True])
def test_a_model_on_a_device_without_kernels_runs_eager_with_one_warning(training: bool) -> None:
    """``meta`` stands for any such device."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to("meta")
    fused = fuse.compile(model)
    x = torch.ones(2, 4, device="meta")
    with torch.set_grad_enabled(training), pytest.warns(UserWarning, match="runs eager") as said:
        results = [fused(x), fused(x)]
    assert [str(warning.message) for warning in said] == ["Sequential runs eager: there are no kernels for meta yet"]
    assert all(result.shape == (2, 4) and result.requires_grad == training for result in results)
    assert fused.last_run.fallbacks[0].reason == "there are no kernels for meta yet"


@pytest.mark.parametrize("training", [False, True])
def test_a_model_that_leaves_for_such_a_device_runs_eager(training: bool) -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).to("meta").tanh()

    fused = fuse.compile(Leaves())
    with torch.set_grad_enabled(training), pytest.warns(UserWarning, match="eager: there are no kernels for meta yet"):
        assert fused(torch.ones(2, 4)).device.type == "meta"
