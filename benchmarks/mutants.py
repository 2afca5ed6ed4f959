"""Changes of guards, one at a time: cosmic-ray's operators, and one that leaves a guard out.

    if value.dtype not in dtypes: return ...     ->     if False: return ...
                                                        if not (value.dtype not in dtypes): return ...

An order (``<``, ``>=``) in the place of ``==`` or ``!=`` is a change only where both sides are numbers: strings, nodes,
terms and tuples of sizes have no order that a guard could mean, and most raise at once, which would count as caught.
``strict=True`` of a ``zip`` asserts, and guards nothing: it is left as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import cosmic_ray.plugins
import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).parents[1]

EQUALITIES, ORDERS = ("Eq", "NotEq"), ("Lt", "LtE", "Gt", "GtE")

OPERATORS = (
    "AddNot",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceUnaryOperator_Delete_Not",
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Is_IsNot", "IsNot_Is")),
    *(
        f"ReplaceComparisonOperator_{one}_{other}"
        for one in (*EQUALITIES, *ORDERS)
        for other in (*EQUALITIES, *ORDERS)
        if one != other
    ),
    "LeaveOut",
)
"""Of cosmic-ray's operators those that change guards; ``is`` for ``==`` is left out: most values are interned."""

Place = tuple[int, int]
"""Line and column."""

Codes = dict[tuple[str, int], CodeType]
"""The code of functions by their names and first lines."""


class LeaveOut:
    """The condition of an ``if`` is never true, that of a comprehension always."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        for place in self._places(node):
            yield node.children[place].start_pos, node.children[place].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        place = self._places(node)[index]
        node.children[place] = parso.parse(" False" if node.type == "if_stmt" else " True")
        return node

    def _places(self, node: Any) -> list[int]:
        if node.type not in ("if_stmt", "comp_if"):
            return []
        return [
            place + 1
            for place, child in enumerate(node.children)
            if child.type == "keyword" and child.value in ("if", "elif")
        ]


@dataclass(frozen=True)
class Mutant:
    """One change of one file; ``occurrence`` is its number among those of the operator."""

    file: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str


def mutants(path: Path, unordered: Container[Place]) -> Iterator[tuple[Mutant, Codes]]:
    """The changes of a file's functions, with the code of those; what runs once, at import, is no guard.

    ``unordered`` are the places of operands of ``==`` and ``!=`` that were seen to be no numbers.
    """
    source = path.read_text()
    lines, sides = source.splitlines(), _sides(source)
    nodes = list(ast_nodes(get_ast(source)))
    for name in OPERATORS:
        operator = LeaveOut() if name == "LeaveOut" else cosmic_ray.plugins.get_operator(f"core/{name}")()
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, ((line, column), _) in enumerate(places):
            if _is_order_for_equality(name) and any(side in unordered for side in _around((line, column), sides)):
                continue
            if lines[line - 1][:column].endswith("strict="):
                continue
            changed = mutate_code(source, operator, occurrence)
            if changed is None or not (codes := changed_functions(path, source, changed)):
                continue
            after = changed.splitlines()[line - 1].strip()
            yield Mutant(str(path.relative_to(ROOT)), line, name, occurrence, lines[line - 1].strip(), after), codes


def changed_functions(path: Path, source: str, changed: str) -> Codes:
    """The code of the functions that differ, by name and line; none where the change is no Python."""
    try:
        old, new = (dict(functions(compile(text, str(path), "exec"))) for text in (source, changed))
    except SyntaxError:  # not alone := ...
        return {}
    return {key: code for key, code in new.items() if key in old and code != old[key]}


def functions(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """The code of the functions in that of a module, each under its name and first line."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 2:  # a function's: class bodies have no fast locals
                yield (inner.co_qualname, inner.co_firstlineno), inner
            yield from functions(inner)


def operands(node: ast.Compare) -> list[ast.expr]:
    """What a comparison compares."""
    return [node.left, *node.comparators]


def place_of(node: ast.expr) -> Place:
    return node.lineno, node.col_offset


def _is_order_for_equality(operator: str) -> bool:
    _, _, pair = operator.partition("ReplaceComparisonOperator_")
    one, _, other = pair.partition("_")
    return one in EQUALITIES and other in ORDERS


def _sides(source: str) -> list[tuple[Place, Place, Place]]:
    """Where the left one of each two neighbours in a comparison begins and ends, and where the right one begins."""
    pairs = (
        pair
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        for pair in zip(operands(node), node.comparators, strict=False)
    )
    return [
        (place_of(left), (left.end_lineno or 0, left.end_col_offset or 0), place_of(right)) for left, right in pairs
    ]


def _around(place: Place, sides: list[tuple[Place, Place, Place]]) -> tuple[Place, ...]:
    """The operands to the left and right of the comparison's sign at ``place``."""
    return next(((left, right) for left, end, right in sides if end <= place < right), ())
