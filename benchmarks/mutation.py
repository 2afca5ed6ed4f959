"""Change one guard of the pattern matcher at a time, and see whether a test notices.

    if value.dtype not in dtypes: return ...     ->     if False: return ...          no test fails: a near miss lacks

cosmic-ray (``pip install cosmic-ray``) makes the mutants: comparisons, ``and``, ``or``, ``not``, conditions negated,
True for False; one operator more leaves a guard out. Its runner starts Python for each mutant; here each is a fork of
one process that has imported everything and collected the tests, puts the changed code into the functions there are,
and runs the tests that reach the changed line, those first that noticed most:

    python -m benchmarks.mutation                     all files below
    python -m benchmarks.mutation conditions search   those whose names are given
"""

from __future__ import annotations

import ast
import builtins
import gc
import itertools
import os
import pickle
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads does not outlive a fork

import cosmic_ray.plugins
import parso
import pytest
from _pytest.runner import runtestprotocol
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

import fuse.passes.match_patterns
import fuse.passes.patterns  # noqa: F401 (before their functions are looked up)
from benchmarks.common import save
from fuse.rewrite.patterns.forms import forms

ROOT = Path(__file__).parents[1]

MATCHER = "conditions matching search replacing exact index forms views canonical terms calls rules"
FILES = (
    *(path for path in sorted((ROOT / "passes/patterns").glob("*.py")) if path.stem != "__init__"),
    ROOT / "passes/match_patterns.py",
    *(ROOT / "fuse/rewrite/patterns" / f"{name}.py" for name in MATCHER.split()),
)

TESTS = (
    "tests/rewrite/patterns",
    "tests/passes/patterns",
    "tests/report/test_explain.py",
    "tests/check/test_lint.py",
    "tests/test_fusions.py",
)
"""No doctests: those cannot be run twice in one process."""

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
        for one in ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE")
        for other in ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE")
        if one != other
    ),
)
"""Of cosmic-ray's operators those that change guards; ``is`` for ``==`` is left out: most values are interned."""

ENDLESS = "it does not end"

MOST_TESTS = 10.0
"""Seconds of the processor that the tests for one mutant may take."""

LONGEST_TEST = 2.0
"""Seconds of the processor that a test may take to be among those that are run for each mutant."""

SLOWEST = 60
"""Seconds of the processor after which a mutant counts as noticed: it does not come to an end."""


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


def operator(name: str) -> Any:
    return LeaveOut() if name == "LeaveOut" else cosmic_ray.plugins.get_operator(f"core/{name}")()


def mutants(path: Path) -> Iterator[tuple[Mutant, Codes]]:
    """The changes of a file's functions, with the code of those; what runs once, at import, is no guard."""
    source = path.read_text()
    lines = source.splitlines()
    for name in (*OPERATORS, "LeaveOut"):
        places = (place for node in ast_nodes(get_ast(source)) for place in operator(name).mutation_positions(node))
        for occurrence, ((line, _), _) in enumerate(places):
            changed = mutate_code(source, operator(name), occurrence)
            if changed is None or not (codes := changed_functions(path, source, changed)):
                continue
            after = changed.splitlines()[line - 1].strip()
            yield Mutant(str(path.relative_to(ROOT)), line, name, occurrence, lines[line - 1].strip(), after), codes


def changed_functions(path: Path, source: str, changed: str) -> Codes:
    """The code of the functions that differ, by name and line; none where the change is no Python."""
    try:
        old, new = (dict(_functions(compile(text, str(path), "exec"))) for text in (source, changed))
    except SyntaxError:  # not alone := ...
        return {}
    return {key: code for key, code in new.items() if key in old and code != old[key]}


def _functions(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 2:  # a function's: class bodies have no fast locals
                yield (inner.co_qualname, inner.co_firstlineno), inner
            yield from _functions(inner)


class Living:
    """The functions of files as they are in this process, by file, name and line."""

    def __init__(self, files: Sequence[Path]) -> None:
        names = set(map(str, files))
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and (code := one.__code__).co_filename in names:
                self.functions[code.co_filename, code.co_qualname, code.co_firstlineno].append(one)

    def put(self, path: Path, codes: Codes) -> None:
        """Change what the functions of a file do."""
        for (name, line), code in codes.items():
            for one in self.functions.get((str(path), name, line), ()):
                if len(code.co_freevars) == len(one.__code__.co_freevars):
                    one.__code__ = code


def forked(work: Callable[[], Any]) -> Any:
    """What ``work`` gives in a fork of this process; None where it does not end."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (SLOWEST, SLOWEST))
        signal.alarm(6 * SLOWEST)  # should it wait for something
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(work(), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(process, 0)
    return pickle.loads(said) if said else None


def failing(items: Sequence[pytest.Item]) -> str | None:
    """The first of ``items`` that fails."""
    for item, following in zip(items, (*items[1:], None), strict=False):
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
            return item.nodeid
    return None


class _Noting(ast.NodeTransformer):
    """Every statement of a function says that it is reached."""

    def __init__(self, path: Path) -> None:
        self.path = path
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

    def _note(self, statement: ast.stmt) -> list[ast.stmt]:
        call = ast.parse(f"reach({str(self.path)!r}, {statement.lineno})").body[0]
        for node in ast.walk(call):
            ast.copy_location(node, statement)
        return [call]


def statement_at(path: Path, line: int) -> int:
    """The line at which the innermost statement around ``line`` begins."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt))
    return max(node.lineno for node in nodes if node.lineno <= line <= (node.end_lineno or 0))


class Runner:
    """A plugin of pytest that runs the mutants in the place of the tests."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.outcomes: list[dict[str, Any]] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        living = Living(self.files)
        by_line, seconds = self._baseline(living, session.items)
        gc.freeze()
        quick = _within(sorted(session.items, key=lambda one: seconds.get(one.nodeid, SLOWEST)), seconds)
        failed = forked(lambda: (failing(quick),))
        print(f"without a mutant, in a fork: {failed and failed[0]} of {len(quick)} tests fails", flush=True)
        for path in self.files:
            noticed = Counter[str]()
            for mutant, codes in mutants(path):
                items = by_line.get((str(path), statement_at(path, mutant.line)), [])
                items = sorted(items, key=lambda one: (-noticed[one.nodeid], seconds[one.nodeid]))
                by = tried(living, path, codes, _within(items, seconds))
                noticed[by or ""] += 1
                self.outcomes.append({**asdict(mutant), "tests": len(items), "noticed_by": by})
                if by in (None, ENDLESS):
                    place = f"{mutant.file}:{mutant.line}  {mutant.operator} ({len(items)} tests) {by or ''}"
                    print(f"{place}\n    {mutant.before}\n    {mutant.after}", flush=True)
            mine = [one for one in self.outcomes if one["file"] == str(path.relative_to(ROOT))]
            print(f"{path.name}: {sum(one['noticed_by'] is not None for one in mine)} of {len(mine)}", flush=True)
        return True

    def _baseline(
        self, living: Living, items: Sequence[pytest.Item]
    ) -> tuple[dict[tuple[str, int], list[pytest.Item]], dict[str, float]]:
        """The tests that reach each statement, and how long each takes; without those that take long or fail."""
        before = {key: [one.__code__ for one in functions] for key, functions in living.functions.items()}
        for path in self.files:
            noting = _Noting(path).visit(ast.parse(path.read_text()))
            living.put(path, dict(_functions(compile(noting, str(path), "exec"))))
        by_line: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
        seconds: dict[str, float] = {}
        for item, following in zip(items, (*items[1:], None), strict=True):
            places: set[tuple[str, int]] = set()
            builtins.reach = lambda *place, places=places: places.add(place)  # type: ignore[attr-defined]
            forms.cache_clear()
            started = time.process_time()
            reports = runtestprotocol(item, log=False, nextitem=following)
            took = time.process_time() - started
            if took <= LONGEST_TEST and not any(one.failed for one in reports):
                seconds[item.nodeid] = took
                for place in places:
                    by_line[place].append(item)
        for key, codes in before.items():
            for one, code in zip(living.functions[key], codes, strict=True):
                one.__code__ = code
        forms.cache_clear()
        print(f"{len(seconds)} of {len(items)} tests, {sum(seconds.values()):.0f} s", flush=True)
        return by_line, seconds


def _within(items: Sequence[pytest.Item], seconds: dict[str, float]) -> list[pytest.Item]:
    """The first tests, as many as take ``MOST_TESTS`` seconds together."""
    ends = itertools.accumulate(seconds.get(item.nodeid, SLOWEST) for item in items)
    return [item for item, end in zip(items, ends, strict=True) if end <= MOST_TESTS]


def tried(living: Living, path: Path, codes: Codes, items: Sequence[pytest.Item]) -> str | None:
    """What notices the mutant: a test, or time."""

    def work() -> tuple[str | None]:
        living.put(path, codes)
        return (failing(items),)

    answer = forked(work)
    return ENDLESS if answer is None else answer[0]


if __name__ == "__main__":
    chosen = sys.argv[1:]
    runner = Runner([path for path in FILES if not chosen or path.stem in chosen])
    pytest.main(
        ["-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-s", "-k", "not generated_calls", *TESTS], [runner]
    )
    counts = Counter(one["file"] for one in runner.outcomes)
    if not chosen:
        survivors = [one for one in runner.outcomes if one["noticed_by"] is None]
        save("mutation", [{"mutants": counts, "survivors": survivors}])
