"""Functions in which both sides of a simple choice are computed: the choice may then be data.

    force = random.random() < ratio       ->     force = COMPARE("lt", random.random(), ratio)
    token = trg[t] if force else top1     ->     token = (
                                                     BOTH(f, MARK(), trg[t], MARK(), top1, False)
                                                     if IS_DRAWN(f := force) and ARE_PLAIN(MARK(), trg, t, top1)
                                                     else (trg[t] if f else top1)
                                                 )

A choice is simple if each side only looks tensors up and changes their layout, dtype or device, or reduces them: then
the side that eager does not take has no effect. An ``if`` whose branches assign one name that is read later
is a choice, too. Its condition is a comparison, or a name that nothing but conditions reads: no other code may see the
object that stands for a truth.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from fuse.graph.patches.recompiling import recompiled

_METHODS = frozenset(
    """
    argmax argmin clone contiguous data detach double expand flatten float int long max min narrow permute repeat
    reshape select size squeeze t to topk transpose type unsqueeze view
    """.split()  # noqa: SIM905
)
_FUNCTIONS = frozenset({"argmax", "argmin", "max", "min", "squeeze", "topk", "unsqueeze"})
"""Functions of the module ``torch``."""
_ATTRIBUTES = frozenset({"T", "data", "mT", "shape"})
_PLAIN = (ast.Constant, ast.Tuple, ast.List, ast.Slice, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)
_TRUTH = "_drawn_truth_{}"
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"
}  # fmt: skip

N = TypeVar("N", bound=ast.AST)


@dataclass(frozen=True)
class Choosing:
    """The functions that rewritten code calls.

    ``compare(name, a, b)``: a comparison whose result only conditions read. ``is_drawn``: whether a condition is the
    truth of a drawn number. ``mark``: the number of operators so far. ``are_plain(mark, *operands)``: whether simple
    expressions have no effect with these operands. ``both(truth, first, a, second, b, is_flag)``: the choice, given the
    marks before its sides; with ``is_flag``, only conditions read it.
    """

    compare: Callable[[str, Any, Any], Any]
    is_drawn: Callable[[Any], bool]
    mark: Callable[[], int]
    are_plain: Callable[..., bool]
    both: Callable[..., Any]


def _nothing(*_: Any) -> Any:
    return None


NOTHING = Choosing(_nothing, _nothing, _nothing, _nothing, _nothing)
"""To ask whether a function has choices."""


def rewritten(function: types.FunctionType, choosing: Choosing) -> types.CodeType | None:
    """The code of ``function`` with its simple choices replaced; None if it has none, or its source is not known."""
    names = {one.name: f"\0{one.name} {id(function.__code__)}" for one in fields(Choosing)}

    def replace(found: ast.FunctionDef) -> Mapping[str, Any]:
        rewriter = _Rewriter(found, names)
        found.body = rewriter.statements(found.body)
        return {text: getattr(choosing, name) for name, text in names.items()} if rewriter.count else {}

    return recompiled(function, replace)


class _Rewriter:
    """Replaces the simple choices in the body of ``function``; ``count`` of them so far."""

    def __init__(self, function: ast.FunctionDef, names: dict[str, str]) -> None:
        self.function = function
        self.names = names
        self.flags = _flags(function)
        self.count = 0

    def statements(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [made for statement in body for made in self._statement(statement)]

    def _statement(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, ast.If) and (name := self._chosen(statement)) is not None:
            test = self._truth(statement.test)
            return [statement] if test is None else self._choice(statement, name, test)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return [statement]  # its names are others
        for part in ("body", "orelse", "finalbody"):
            if isinstance(inner := getattr(statement, part, None), list):
                setattr(statement, part, self.statements(inner))
        for handler in getattr(statement, "handlers", ()):
            handler.body = self.statements(handler.body)
        if isinstance(statement, ast.Assign):
            is_flag = self._is_flag(statement)
            one = statement.value
            if isinstance(one, ast.IfExp) and _is_simple(one.body) and _is_simple(one.orelse):
                statement.value = self._expression(one, is_flag)
            elif is_flag:
                statement.value = self._truth(one) or one
        return [statement]

    def _is_flag(self, statement: ast.stmt) -> bool:
        """Whether a statement only assigns a name that nothing but conditions reads."""
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        return len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id in self.flags

    def _truth(self, test: ast.expr) -> ast.expr | None:
        """A condition that may be the truth of a drawn number; None for others."""
        if isinstance(test, ast.Name):
            return test if test.id in self.flags else None
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or type(test.ops[0]) not in _COMPARISONS:
            return None
        name = ast.Constant(_COMPARISONS[type(test.ops[0])])
        return _at(test, self._call("compare", name, test.left, test.comparators[0]))

    def _tested(self, truth: str, test: ast.expr, read: Iterable[str]) -> ast.expr:
        """Whether both sides are computed, which read these names."""
        is_drawn = self._call("is_drawn", ast.NamedExpr(_store(truth), test))
        plain = self._call("are_plain", self._call("mark"), *map(_load, dict.fromkeys(read)))
        return ast.BoolOp(ast.And(), [is_drawn, plain])

    def _expression(self, one: ast.IfExp, is_flag: bool) -> ast.expr:
        test = self._truth(one.test)
        if test is None:
            return one
        truth, flag = self._next(), ast.Constant(is_flag)
        tested = self._tested(truth, test, _loads([one.body, one.orelse]))
        both = self._call("both", _load(truth), self._call("mark"), one.body, self._call("mark"), one.orelse, flag)
        return _at(one, ast.IfExp(tested, both, ast.IfExp(_load(truth), one.body, one.orelse)))

    def _choice(self, one: ast.If, name: str, test: ast.expr) -> list[ast.stmt]:
        """``if test: ... name = a`` and ``else: ... name = b``, with marks before and after the first branch."""
        truth, flag = self._next(), ast.Constant(name in self.flags)
        first, second, side = (f"{truth}_{part}" for part in ("first", "second", "side"))
        both = [
            ast.Assign([_store(first)], self._call("mark")),
            *one.body,
            ast.Assign([_store(side)], _load(name)),
            ast.Assign([_store(second)], self._call("mark")),
            *one.orelse,
            ast.Assign(
                [_store(name)],
                self._call("both", _load(truth), _load(first), _load(side), _load(second), _load(name), flag),
            ),
        ]
        own = {*(_assigned(one.body) or ()), *(_assigned(one.orelse) or ())}
        tested = self._tested(truth, test, (name for name in _loads([*one.body, *one.orelse]) if name not in own))
        return [_at(one, ast.If(tested, both, [ast.If(_load(truth), one.body, one.orelse)]))]

    def _chosen(self, one: ast.If) -> str | None:
        """The name that both branches of an ``if`` assign last, if that is all that they do for the code after it."""
        sides = [_assigned(one.body), _assigned(one.orelse)]
        if not sides[0] or not sides[1] or sides[0][-1] != sides[1][-1]:
            return None
        name = sides[0][-1]
        own = {*sides[0], *sides[1]}
        if any(_reads_ahead(branch, own) for branch in (one.body, one.orelse)):
            return None
        within, everywhere = list(_loads([*one.body, *one.orelse])), list(_loads([self.function]))
        is_local = all(within.count(other) == everywhere.count(other) for other in own - {name})
        return name if is_local and name not in within else None

    def _next(self) -> str:
        self.count += 1
        return _TRUTH.format(self.count)

    def _call(self, name: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(ast.Constant(self.names[name]), list(arguments), [])


_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp, ast.ClassDef)
"""Code in a function that may run after it."""


def _flags(function: ast.FunctionDef) -> set[str]:
    """The names that nothing but conditions of the function itself reads."""
    tests: set[int] = set()
    read: set[str] = set()
    inner = [node for node in ast.walk(function) if isinstance(node, _LATER) and node is not function]
    later = {id(node) for one in inner for node in ast.walk(one)}
    for node in ast.walk(function):
        if id(node) in later:
            continue
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            tests.add(id(node.test))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            tests.add(id(node.operand))
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read.add(node.target.id)
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    read.update(node.id for node in names if isinstance(node.ctx, ast.Load) and id(node) not in tests)
    return {node.id for node in names} - read


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _store(name: str) -> ast.Name:
    return ast.Name(name, ast.Store())


def _assigned(body: Sequence[ast.stmt]) -> list[str] | None:
    """The names that simple assignments assign, in order; None if there is any other statement."""
    found: list[str] = []
    for statement in body:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not _is_simple(statement.value):
            return None
        (target,) = statement.targets
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        if not all(isinstance(one, ast.Name) for one in targets):
            return None
        found += [one.id for one in targets if isinstance(one, ast.Name)]
    return found


def _reads_ahead(body: Sequence[ast.stmt], names: set[str]) -> bool:
    """Whether one of these names is read before it is assigned."""
    known: set[str] = set()
    for statement in body:
        if not names.isdisjoint(set(_loads([statement])) - known):
            return True
        known.update(_assigned([statement]) or ())
    return False


def _loads(statements: Sequence[ast.AST]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield node.id


def _is_simple(value: ast.AST) -> bool:
    """Whether an expression has no effect where its operands are tensors, numbers and containers of them."""
    if isinstance(value, ast.Call):
        if not isinstance(value.func, ast.Attribute):
            return False
        owner, name = value.func.value, value.func.attr
        is_torch = isinstance(owner, ast.Name) and owner.id == "torch"
        if name not in (_FUNCTIONS if is_torch else _METHODS):
            return False
        arguments = [*value.args, *(one.value for one in value.keywords)]
        return (is_torch or _is_simple(owner)) and all(map(_is_simple, arguments))
    if isinstance(value, ast.Attribute):
        is_dtype = isinstance(value.value, ast.Name) and value.value.id == "torch"
        return is_dtype or (value.attr in _ATTRIBUTES and _is_simple(value.value))
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, (ast.Add, ast.Sub, ast.Mult)) and _is_simple(value.left) and _is_simple(value.right)
    if isinstance(value, (ast.Name, ast.Subscript, *_PLAIN)):
        return all(map(_is_simple, ast.iter_child_nodes(value)))
    return False


def _at(where: ast.AST, node: N) -> N:
    """``node`` at the line of ``where``."""
    ast.copy_location(node, where)
    return ast.fix_missing_locations(node)
