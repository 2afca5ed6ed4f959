"""Set module-level constants of a model file before it runs.

    hidden = 128                                        hidden = 64
    gates = 4 * hidden        -> --set hidden=64 ->     gates = 4 * hidden

The assignment itself is replaced in the syntax tree, so everything the file derives from the constant follows. Only
assignments at module level count, those inside ``if``, ``try``, ``with`` and loops included; functions and classes have
names of their own.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fuse.errors import FuseError

_Statement = TypeVar("_Statement", ast.Assign, ast.AnnAssign, ast.AugAssign)


@dataclass(frozen=True)
class Override:
    """One ``--set NAME=VALUE``; ``text`` is VALUE as written."""

    name: str
    text: str


def parse_setting(text: str) -> Override:
    """Split ``NAME=VALUE``; whether VALUE is acceptable depends on the file it is for (see ``apply_settings``).

    Raises ``FuseError`` where there is no ``=`` or NAME is no Python name.

    >>> parse_setting("batch_size=4")
    Override(name='batch_size', text='4')
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name.isidentifier():
        raise FuseError(f"cannot read --set {text!r}; write NAME=VALUE, for example --set batch_size=4")
    return Override(name, value.strip())


def apply_settings(tree: ast.Module, settings: Sequence[Override], shown_path: str) -> ast.Module:
    """Replace, in place, every module-level assignment to a set name; returns ``tree``.

    VALUE is a Python literal; a bare word will do where the file's own value is a string (a shell takes the quotes
    away). Raises ``FuseError`` where VALUE is neither, or the file (named ``shown_path``) assigns no such constant.

    >>> tree = ast.parse("hidden: int = 128\\ngates = 4 * hidden")
    >>> print(ast.unparse(apply_settings(tree, [parse_setting("hidden=64")], "model.py")))
    hidden: int = 64
    gates = 4 * hidden
    """
    constants = _module_level_values(tree)
    replacements = {}
    for setting in settings:
        if setting.name not in constants:
            raise FuseError(_no_such_constant(setting.name, constants, shown_path))
        replacements[setting.name] = _value_expression(setting, constants[setting.name])
    _ReplaceAssignments(replacements).visit(tree)
    return ast.fix_missing_locations(tree)


def _no_such_constant(name: str, constants: Iterable[str], shown_path: str) -> str:
    public = [constant for constant in constants if not constant.startswith("_")]
    close = difflib.get_close_matches(name, public, n=1)
    if close:
        advice = f"did you mean {close[0]!r}?"
    elif public:
        advice = f"it has {', '.join(public)}"
    else:
        advice = "it has none"
    return f"{shown_path} sets no module-level constant {name!r}; {advice}"


def _value_expression(setting: Override, current: ast.expr | None) -> ast.expr:
    try:
        ast.literal_eval(setting.text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if setting.text.isidentifier() and isinstance(current, ast.Constant) and isinstance(current.value, str):
            return ast.Constant(setting.text)
        written = f"--set {setting.name}={setting.text}"
        raise FuseError(f"cannot read the value of {written}; write a Python literal, such as 4, 0.5 or True") from None
    return ast.parse(setting.text, mode="eval").body


def _module_level_values(tree: ast.Module) -> dict[str, ast.expr | None]:
    """Names assigned at module level, each with the expression first assigned (None for one part of a tuple)."""
    found: dict[str, ast.expr | None] = {}
    for statement in _module_level(tree.body):
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                for name in _names(target):
                    found.setdefault(name, statement.value if isinstance(target, ast.Name) else None)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            for name in _names(statement.target):
                found.setdefault(name, statement.value)
    return found


def _module_level(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        yield node
        yield from _module_level(ast.iter_child_nodes(node))


def _names(target: ast.expr) -> Iterator[str]:
    """Plain names bound by an assignment's target: ``a``, ``a, (b, *c)``, but nothing of ``a.b`` or ``a[0]``."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _names(element)
    elif isinstance(target, ast.Starred):
        yield from _names(target.value)


class _ReplaceAssignments(ast.NodeTransformer):
    """``a = x`` becomes ``a = VALUE``; ``a, b = x`` is followed by ``a = VALUE``."""

    def __init__(self, replacements: dict[str, ast.expr]) -> None:
        self.replacements = replacements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.AST]:
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            return self._with_value(node, node.targets[0].id)
        names = [name for target in node.targets for name in _names(target) if name in self.replacements]
        return [node, *(self._assignment(name, node) for name in names)]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None or not isinstance(node.target, ast.Name):
            return node
        return self._with_value(node, node.target.id)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if isinstance(node.target, ast.Name) and node.target.id in self.replacements:
            return self._assignment(node.target.id, node)
        return node

    def _with_value(self, node: _Statement, name: str) -> _Statement:
        if name in self.replacements:
            node.value = ast.copy_location(self.replacements[name], node.value or node)
        return node

    def _assignment(self, name: str, node: ast.stmt) -> ast.Assign:
        assignment = ast.Assign(targets=[ast.Name(name, ast.Store())], value=self.replacements[name])
        return ast.copy_location(assignment, node)
