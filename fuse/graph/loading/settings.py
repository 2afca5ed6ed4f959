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
from collections.abc import Sequence
from dataclasses import dataclass

from fuse.errors import FuseError


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
    replaced = _ReplaceAssignments({setting.name: setting.text for setting in settings})
    replaced.visit(tree)
    for setting in settings:
        if setting.name not in replaced.assigned:
            public = [name for name in replaced.assigned if not name.startswith("_")]
            close = difflib.get_close_matches(setting.name, public, n=1)
            advice = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(public) or 'none'}"
            raise FuseError(f"{shown_path} sets no module-level constant {setting.name!r}; {advice}")
    return ast.fix_missing_locations(tree)


class _ReplaceAssignments(ast.NodeTransformer):
    """``a = x`` becomes ``a = VALUE``; ``a, b = x`` and ``a += x`` are followed by ``a = VALUE``.

    ``assigned`` are the names that the module assigns, in order.
    """

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.assigned: dict[str, None] = {}
        self.values: dict[str, ast.expr] = {}

    def visit_FunctionDef(self, node: ast.stmt) -> ast.stmt:
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> ast.stmt | list[ast.stmt]:
        if node.value is None:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        named = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        names = [part.id for part in named if isinstance(part.ctx, ast.Store)]
        alone = targets == named and not isinstance(node, ast.AugAssign)
        self.assigned |= dict.fromkeys(names)
        values = [(name, self._value(name, node.value if alone else None)) for name in names if name in self.texts]
        if alone and len(names) == 1:
            node.value = values[0][1] if values else node.value
            return node
        return [node, *(ast.copy_location(ast.Assign([ast.Name(n, ast.Store())], v), node) for n, v in values)]

    visit_AnnAssign = visit_AugAssign = visit_Assign

    def _value(self, name: str, current: ast.expr | None) -> ast.expr:
        """The new value of ``name``, for all its assignments; text will do if the first ``current`` value is text."""
        if name not in self.values:
            text = self.texts[name]
            try:
                ast.literal_eval(text)
                self.values[name] = ast.parse(text, mode="eval").body
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                if not text.isidentifier() or not (isinstance(current, ast.Constant) and type(current.value) is str):
                    advice = "write a Python literal, such as 4, 0.5 or True"
                    raise FuseError(f"cannot read the value of --set {name}={text}; {advice}") from None
                self.values[name] = ast.Constant(text)
        return self.values[name]
