"""Change one guard of the pattern matcher at a time, and see whether a test notices.

    if value.dtype not in dtypes: return ...     ->     if False: return ...          no test fails: a near miss lacks

cosmic-ray (``pip install cosmic-ray``) makes the mutants (:mod:`benchmarks.mutants`). Its runner starts Python for each
mutant; here each is a fork of one process that has imported everything and collected the tests, puts the changed code
into the functions there are, and runs the tests that reach the changed line, those first that noticed most and those
that are named after the file. Two forks run at once. What was found is written file by file; files that are as they
were when last tried are not tried again:

    python -m benchmarks.mutation                     all files below
    python -m benchmarks.mutation conditions search   those whose names are given, whatever was found before
    python -m benchmarks.mutation --survivors         the mutants that no test noticed, after tests were added

Files and folders of tests, when given too, are those that are run.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import math
import os
import pickle
import resource
import select
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads does not outlive a fork

import pytest
from _pytest.runner import runtestprotocol

import fuse.passes.match_patterns
import fuse.passes.patterns  # noqa: F401 (before their functions are looked up)
from benchmarks import reaching
from benchmarks.common import RESULTS, ROOT, save
from benchmarks.mutants import Codes, Mutant, mutants
from fuse.runtime.building import cache

MATCHER = "conditions matching search replacing exact_match mismatch index forms views canonical terms calls rules"
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

ENDLESS = "it does not end"

FORKS = 2
"""Mutants that are tried at once."""

MOST_TESTS, MORE_TESTS = 8.0, 40.0
"""Seconds of the processor that the tests for one mutant may take; for one that was not noticed before."""

LONGEST_TEST = 8.0
"""Seconds of the processor that a test may take to be among those that are run for each mutant."""

SLOWEST = 4
"""A mutant counts as noticed when it takes so many times as long as its tests may: it does not come to an end."""


class Living:
    """The functions of files as they are in this process, by file, name and line, and what caches their results."""

    def __init__(self, files: Sequence[Path]) -> None:
        names = set(map(str, files))
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        self.caches: list[Any] = []
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and (code := one.__code__).co_filename in names:
                self.functions[code.co_filename, code.co_qualname, code.co_firstlineno].append(one)
            elif isinstance(one, functools._lru_cache_wrapper):
                made_in = getattr(getattr(one, "__wrapped__", None), "__code__", None)
                if made_in is not None and made_in.co_filename in names:
                    self.caches.append(one)

    def put(self, path: Path, codes: Codes) -> None:
        """Change what the functions of a file do, and forget what they have given so far."""
        for (name, line), code in codes.items():
            for one in self.functions.get((str(path), name, line), ()):
                if len(code.co_freevars) == len(one.__code__.co_freevars):
                    one.__code__ = code
        self.forget()

    def forget(self) -> None:
        """Empty the caches."""
        for one in self.caches:
            one.cache_clear()


@dataclass(frozen=True)
class Fork:
    """A process that tries one mutant; what it found can be read from ``pipe`` when it is done."""

    mutant: Mutant
    statement: tuple[str, int]
    tests: int
    process: int
    pipe: int

    def answer(self) -> str | None:
        """What noticed the mutant: a test, or time; None where nothing did."""
        with os.fdopen(self.pipe, "rb") as pipe:
            said = pipe.read()
        os.waitpid(self.process, 0)
        return pickle.loads(said)[0] if said else ENDLESS


def forked(work: Callable[[], Any], seconds: float) -> tuple[int, int]:
    """A fork of this process that writes what ``work`` gives, in a tuple, into a pipe; its number, and the pipe.

    It ends after ``seconds`` of the processor, whatever it does.
    """
    reading, writing = os.pipe()
    if process := os.fork():
        os.close(writing)
        return process, reading
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    signal.alarm(int(10 * seconds))  # should it wait for something
    gc.disable()  # collecting would touch, and so copy, all memory
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    cache.store = _not_stored  # what a mutant thinks of a pattern is not to be remembered
    try:
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump((work(),), pipe)
    finally:
        os._exit(0)


def _not_stored(key: str, content: bytes) -> Path:
    """Keep ``content`` for this process alone."""
    return cache._publish(cache.private_directory() / key[:2] / cache._entry_name(key, content), content)


def failing(items: Sequence[pytest.Item]) -> str | None:
    """The first of ``items`` that fails."""
    for item, following in zip(items, (*items[1:], None), strict=False):
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
            return item.nodeid
    return None


class Runner:
    """A plugin of pytest that runs the mutants in the place of the tests; ``again``: those that no test noticed."""

    def __init__(self, files: Sequence[Path], again: bool) -> None:
        self.files = files
        self.again = again
        self.most = MORE_TESTS if again else MOST_TESTS

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.living = Living(FILES)  # whichever are tried: others remember what those gave
        self._baseline(session.items)
        quick = self._within(sorted(session.items, key=self._costs))
        process, pipe = forked(lambda: failing(quick), SLOWEST * self.most)
        answer = Fork(Mutant("", 0, "", 0, "", ""), ("", 0), len(quick), process, pipe).answer()
        print(f"without a mutant, in a fork: {answer or 'none'} of {len(quick)} tests fails", flush=True)
        for path in self.files:
            self._try_file(path)
        return True

    def _baseline(self, items: Sequence[pytest.Item]) -> None:
        """Run all tests once: which reach each statement, and how long each takes; long ones and failing ones are
        left out.
        """
        before = {key: [one.__code__ for one in functions] for key, functions in self.living.functions.items()}
        for path in self.files:
            self.living.put(path, reaching.noting(path))
        self.by_statement: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
        self.seconds: dict[str, float] = {}
        for item, following in zip(items, (*items[1:], None), strict=True):
            self.living.forget()
            started = time.process_time()
            with reaching.reached() as places:
                reports = runtestprotocol(item, log=False, nextitem=following)
            took = time.process_time() - started
            if took <= LONGEST_TEST and not any(one.failed for one in reports):
                self.seconds[item.nodeid] = took
                for place in places:
                    self.by_statement[place].append(item)
        for key, codes in before.items():
            for one, code in zip(self.living.functions[key], codes, strict=True):
                one.__code__ = code
        self.living.forget()
        print(f"{len(self.seconds)} of {len(items)} tests, {sum(self.seconds.values()):.0f} s", flush=True)

    def _try_file(self, path: Path) -> None:
        """Try the mutants of one file, and write down what became of them."""
        name, started = str(path.relative_to(ROOT)), time.monotonic()
        self.noticed = Counter[Any]()
        waiting = self._tried(path)
        outcomes: list[dict[str, Any]] = []
        running: dict[int, Fork] = {}
        while True:
            for fork in itertools.islice(waiting, FORKS - len(running)):
                running[fork.pipe] = fork
            if not running:
                break
            for pipe in select.select(list(running), (), ())[0]:
                fork = running.pop(pipe)
                by = fork.answer()
                self.noticed[by] += 1
                self.noticed[fork.statement, by] += 1
                outcomes.append({**asdict(fork.mutant), "tests": fork.tests, "noticed_by": by})
                if by in (None, ENDLESS):
                    place = f"{name}:{fork.mutant.line}  {fork.mutant.operator} ({fork.tests} tests) {by or ''}"
                    print(f"{place}\n    {fork.mutant.before}\n    {fork.mutant.after}", flush=True)
        outcomes.sort(key=lambda one: (one["line"], one["operator"], one["occurrence"]))
        survivors = [one for one in outcomes if one["noticed_by"] is None]
        done = so_far()  # another run may have added to it
        again, known = self._again(path), done.get(name, {})
        gone = 0 if again is None else len(again) - len(outcomes)  # no mutants any more, by the rules there are now
        count = len(outcomes) if again is None else known["mutants"] - gone
        without_end = sum(one["noticed_by"] == ENDLESS for one in outcomes)
        done[name] = {
            "file": name,
            "source": source_of(path),
            "mutants": count,
            "noticed": count - len(survivors),
            "without_end": without_end + (0 if again is None else known["without_end"]),
            "survivors": survivors,
        }
        save("mutation", [done[key] for key in map(_name, FILES) if key in done])
        print(f"{name}: {count - len(survivors)} of {count}, {time.monotonic() - started:.0f} s", flush=True)

    def _again(self, path: Path) -> list[dict[str, Any]] | None:
        """The mutants of a file that are to be tried; None for all of them."""
        known = so_far().get(_name(path))
        if not self.again or known is None or known["source"] != source_of(path):
            return None
        return list(known["survivors"])

    def _tried(self, path: Path) -> Iterator[Fork]:
        """A fork for each mutant of a file, begun when it is asked for."""
        again = self._again(path)
        for mutant, codes in mutants(path, reaching.unordered(path)):
            if again is not None and _key(asdict(mutant)) not in map(_key, again):
                continue
            statement = (str(path), reaching.statement_at(path, mutant.line))
            reaching_it = self.by_statement.get(statement, [])
            order = sorted(reaching_it, key=functools.partial(self._rank, path, statement))
            items = self._within(order)

            def work(codes: Codes = codes, items: Sequence[pytest.Item] = items) -> str | None:
                self.living.put(path, codes)
                return failing(items)

            yield Fork(mutant, statement, len(items), *forked(work, SLOWEST * self.most))

    def _rank(self, path: Path, statement: tuple[str, int], item: pytest.Item) -> tuple[float, ...]:
        """Those first that noticed other mutants of the statement, then the file's own, then those that noticed other
        mutants of it, then the short ones.
        """
        name = item.nodeid
        others = item.path.stem != f"test_{path.stem}"
        return -self.noticed[statement, name], others, -self.noticed[name], self.seconds[name]

    def _costs(self, item: pytest.Item) -> float:
        return self.seconds.get(item.nodeid, math.inf)

    def _within(self, items: Iterable[pytest.Item]) -> list[pytest.Item]:
        """The first tests, as many as may be run for a mutant."""
        items = list(items)
        ends = itertools.accumulate(map(self._costs, items))
        return [item for item, end in zip(items, ends, strict=True) if end <= self.most]


def so_far() -> dict[str, dict[str, Any]]:
    """What was found, by file."""
    results = RESULTS / "mutation.json"
    return {one["file"]: one for one in json.loads(results.read_text())["cases"]} if results.exists() else {}


def source_of(path: Path) -> str:
    """What tells whether a file is as it was."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _key(mutant: dict[str, Any]) -> tuple[Any, ...]:
    return mutant["file"], mutant["operator"], mutant["occurrence"], mutant["before"], mutant["after"]


if __name__ == "__main__":
    tests = [one for one in sys.argv[1:] if one.startswith("tests/")]
    chosen = [one for one in sys.argv[1:] if one not in tests and one != "--survivors"]
    again = "--survivors" in sys.argv
    done = so_far()
    if again:
        left = [path for path in FILES if done.get(_name(path), {}).get("survivors")]
        files = [path for path in left if path.stem in chosen or not chosen]
    else:
        as_before = {path for path in FILES if done.get(_name(path), {}).get("source") == source_of(path)}
        files = [path for path in FILES if (path.stem in chosen if chosen else path not in as_before)]
    if files:
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-s", "-k", "not generated_calls"]
        pytest.main([*options, *(tests or TESTS)], [Runner(files, again)])
    done = so_far()
    for case in done.values():
        print(f"| `{case['file']}` | {case['mutants']} | {case['noticed']} | {len(case['survivors'])} |")
    total = sum(case["mutants"] for case in done.values())
    noticed = sum(case["noticed"] for case in done.values())
    print(f"{noticed} of {total} mutants are noticed, {100 * noticed / max(total, 1):.1f} %")
