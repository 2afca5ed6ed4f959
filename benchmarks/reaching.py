"""Which statements a test reaches, and whether what it compares are numbers: for :mod:`benchmarks.mutation`.

    if a.name == b.name: ...     ->     reach(7); if beside((7, 3), a.name) == beside((7, 13), b.name): ...

Functions are given code that says so while it runs.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.mutants import Codes, Place, functions, operands, place_of

_unordered: dict[str, set[Place]] = defaultdict(set)


def noting(path: Path) -> Codes:
    """The code of a file's functions, which says what is reached."""
    tree = _Noting(str(path)).visit(ast.parse(path.read_text()))
    return dict(functions(compile(ast.fix_missing_locations(tree), str(path), "exec")))


@contextmanager
def reached() -> Iterator[set[tuple[str, int]]]:
    """The file and line of each statement that is reached from here on."""
    places: set[tuple[str, int]] = set()
    builtins.mutation_reach = lambda *place: places.add(place)
    builtins.mutation_beside = _beside
    yield places


def unordered(path: Path) -> set[Place]:
    """The operands of ``==`` and ``!=`` in a file that were seen to be no numbers."""
    return _unordered[str(path)]


def statement_at(path: Path, line: int) -> int:
    """The line at which the innermost statement around ``line`` begins."""
    return max(first for first, last in _statements(path) if first <= line <= last)


@functools.cache
def _statements(path: Path) -> list[Place]:
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt))
    return [(node.lineno, node.end_lineno or 0) for node in nodes]


def _beside(file: str, place: Place, value: Any) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        _unordered[file].add(place)
    return value


class _Noting(ast.NodeTransformer):
    """Every statement of a function says that it is reached, and every operand of an equality what it is."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.inside = False

    def generic_visit(self, node: ast.AST) -> ast.AST:
        outside, self.inside = self.inside, self.inside or isinstance(node, ast.FunctionDef)
        super().generic_visit(node)
        for name in (
            ("body", "orelse", "finalbody") if self.inside and isinstance(node, ast.stmt | ast.excepthandler) else ()
        ):
            if statements := getattr(node, name, None):
                setattr(node, name, [one for statement in statements for one in (*self._note(statement), statement)])
        self.inside = outside
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        places = [place_of(one) for one in operands(node)]
        super().generic_visit(node)
        if any(isinstance(sign, ast.Eq | ast.NotEq) for sign in node.ops):
            node.left, *node.comparators = (
                self._call("mutation_beside", one, place, one)
                for one, place in zip(operands(node), places, strict=True)
            )
        return node

    def _note(self, statement: ast.stmt) -> list[ast.stmt]:
        call = ast.Expr(self._call("mutation_reach", statement, statement.lineno))
        return [ast.copy_location(call, statement)]

    def _call(self, name: str, at: ast.stmt | ast.expr, *arguments: Any) -> ast.expr:
        given = [one if isinstance(one, ast.expr) else ast.Constant(one) for one in (self.file, *arguments)]
        call = ast.Call(ast.Name(name, ast.Load()), given, [])
        for node in (call, call.func, *(one for one in given if isinstance(one, ast.Constant))):
            ast.copy_location(node, at)
        return call
