"""The smallest program that still goes wrong: calls, results, statements and operations are left out one at a time."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.drawing import Program


def shrink(program: Program, fails: Callable[[Program], bool], most_trials: int = 400) -> Program:
    """Leave out what can be left out while ``fails`` says that the program still goes wrong the same way.

    Simple steps come first (a call, a result, a whole statement), then an operation gives way to one of its operands.
    A round is repeated until nothing more can go, or ``most_trials`` programs were tried.
    """
    trials = 0
    found = True
    while found:
        found = False
        for smaller in _smaller(program):
            trials += 1
            if trials > most_trials:
                return program
            if fails(smaller):
                program, found = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    if len(program.calls) > 1:
        for number in range(len(program.calls)):
            yield replace(program, calls=program.calls[:number] + program.calls[number + 1 :])
    if program.train:
        calls = tuple(tuple(t.detach() for t in inputs) for inputs in program.calls)
        yield replace(program, train=False, calls=calls)
    if program.shared_out:
        yield replace(program, shared_out=False)
    tree = ast.parse(program.text)
    for edited in (*_fewer_results(tree), *_fewer_statements(tree), *_fewer_operations(tree)):
        yield replace(program, text=ast.unparse(edited))


def _fewer_results(tree: ast.Module) -> Iterator[ast.Module]:
    for number in range(len(_results(tree))):
        edited = copy.deepcopy(tree)
        results = _results(edited)
        if len(results) > 1:
            del results[number]
            yield edited


def _results(tree: ast.Module) -> list[ast.expr]:
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    last = function.body[-1]
    assert isinstance(last, ast.Return)
    assert isinstance(last.value, ast.List)
    return last.value.elts


def _fewer_statements(tree: ast.Module) -> Iterator[ast.Module]:
    """Without one statement, the last ones first: what nothing reads any more goes at once. The result stays."""
    for number in reversed(range(len(_places(tree)))):
        edited = copy.deepcopy(tree)
        body, position = _places(edited)[number]
        if not isinstance(body[position], ast.Return):
            del body[position]
            if body:
                yield edited


def _places(tree: ast.Module) -> list[tuple[list[ast.stmt], int]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.For | ast.If):
            found += [(node.body, position) for position in range(len(node.body))]
    return found


def _fewer_operations(tree: ast.Module) -> Iterator[ast.Module]:
    """One operation replaced by an operand: ``a + b`` by a or b, ``f(a)`` by a, ``a.f()`` by a, ``a[0]`` by a."""
    for number in range(len(_values(tree))):
        for choice in range(3):
            edited = copy.deepcopy(tree)
            statement = _values(edited)[number]
            operands = _operands(statement.value)
            if choice < len(operands) and not isinstance(operands[choice], ast.Starred):
                statement.value = operands[choice]
                yield edited


def _values(tree: ast.Module) -> list[ast.Assign]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]


def _operands(value: ast.expr) -> list[ast.expr]:
    match value:
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.UnaryOp(operand=operand):
            return [operand]
        case ast.IfExp(body=body, orelse=orelse):
            return [body, orelse]
        case (
            ast.Call(func=ast.Attribute(value=ast.Name(id="torch")))
            | ast.Call(func=ast.Attribute(value=ast.Attribute()))
        ):
            return value.args[:3]
        case ast.Call(func=ast.Attribute(value=receiver)):
            return [receiver, *value.args[:2]]
        case ast.Subscript(value=container):
            return [container]
        case ast.Attribute(value=container):
            return [container]
    return []
