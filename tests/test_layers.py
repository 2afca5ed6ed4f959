"""Imports run downwards, as the table in docs/architecture.md has it; imports inside functions count."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (?P<folders>(?:`[\w/.]+`(?:, )?)+) \| .* \| (?P<below>[\w, ]+) \|$")


def layer_of(path: str) -> str:
    """
    >>> layer_of("fuse/kernel/cpu/emit.py"), layer_of("fuse/ops.py"), layer_of("passes/dead_code.py")
    ('kernel', 'ops', 'passes')
    """
    first, *rest = path.removesuffix(".py").strip("/").split("/")
    return rest[0] if first == "fuse" and rest else first


def table() -> dict[str, set[str]]:
    """The layers that each layer may import: those that its row names, and theirs in turn."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = [found for line in text.splitlines() if (found := ROW.match(line))]
    named = {
        layer_of(folder): set(row["below"].split(", "))
        for row in rows
        for folder in re.findall(r"`([\w/.]+)`", row["folders"])
    }

    def reached(layer: str) -> set[str]:
        return {layer}.union(*(reached(below) for below in named.get(layer, ())))

    return {layer: set(named) if "all" in below else reached(layer) for layer, below in named.items()}


def imports() -> Iterator[tuple[str, str, str]]:
    """Importing layer, imported layer, and the line, for every import of ours in fuse and passes."""
    for path in sorted([*(ROOT / "fuse").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]):
        place = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "fuse":
                names = [f"fuse.{alias.name}" for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.startswith("fuse."):
                    yield layer_of(place), name.split(".")[1], f"{place}:{node.lineno}"


def test_imports_run_downwards() -> None:
    layers = table()
    upwards = [
        f"{line}: {importer} imports {imported}"
        for importer, imported, line in imports()
        if importer in layers and imported in layers and imported not in layers[importer]
    ]
    assert not upwards


def test_the_table_names_every_folder() -> None:
    folders = {path.name for path in (ROOT / "fuse").iterdir() if (path / "__init__.py").exists()}
    assert folders | {"passes", "ops"} <= set(table())


FOLDER = re.compile(r"^\| `fuse/(?P<layer>\w+)/(?P<folder>\w+)/` \| [^|]* \|$", re.MULTILINE)
"""A row of the table of folders within layers."""


def folders_of_layers() -> list[tuple[str, str]]:
    """The folders of the second table, with their layers; imports run from later ones to earlier ones."""
    return [(row["layer"], row["folder"]) for row in FOLDER.finditer((ROOT / "docs" / "architecture.md").read_text())]


def test_the_second_table_names_every_folder_of_a_layer() -> None:
    packages = {(path.parts[-3], path.parts[-2]) for path in (ROOT / "fuse").glob("*/*/__init__.py")}
    assert set(folders_of_layers()) == packages


def test_folders_of_a_layer_import_folders_above_them() -> None:
    order = {place: number for number, place in enumerate(folders_of_layers())}
    upwards = []
    for layer, folder in order:
        for path in sorted((ROOT / "fuse" / layer / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                first, *rest = ((isinstance(node, ast.ImportFrom) and node.module) or "").split(".")
                place = tuple(rest[:2])
                if first == "fuse" and rest[:1] == [layer] and order.get(place, -1) > order[layer, folder]:
                    upwards.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {node.module}")
    assert not upwards


def test_only_the_target_itself_and_what_runs_it_import_a_target() -> None:
    allowed = ("fuse/kernel/cpu/", "fuse/runtime/cpu/")
    found = [
        str(path.relative_to(ROOT))
        for path in [*(ROOT / "fuse").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
        if re.search(r"^\s*(from|import) fuse\.(kernel|runtime)\.cpu", path.read_text(), re.MULTILINE)
    ]
    assert found
    assert [path for path in found if not path.startswith(allowed)] == []
