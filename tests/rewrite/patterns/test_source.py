"""What is known of a pattern is found again by another process: its source says the same there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fuse.rewrite.patterns.definition import define
from fuse.rewrite.patterns.pattern_cache import source_of

TELL = """
import hashlib, time
from fuse.rewrite.patterns import registry
from fuse.rewrite.patterns.forms import known_runs, takes_lists
from fuse.rewrite.patterns.pattern_cache import source_of
import fuse.runtime.building.cache

patterns = registry.registered()
started = time.process_time()
for one in patterns[::4]:
    known_runs(one, max(1, takes_lists(one)))
spent = time.process_time() - started
told = "".join(source_of(one) for one in patterns)
print(len(patterns), hashlib.sha256(told.encode()).hexdigest(), spent)
"""

MOST = 0.1
"""Seconds to find out nothing new of all patterns: they take 0.02."""


def test_what_is_kept_of_the_librarys_patterns_is_found_by_the_next_process(tmp_path: Path) -> None:
    told = []
    for seed in ("1", "2"):
        given = {**os.environ, "FUSE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONHASHSEED": seed}
        found = subprocess.run([sys.executable, "-c", TELL], env=given, capture_output=True, text=True, check=True)
        told.append(found.stdout.split())
    (_, first, _), (count, second, spent) = told
    assert int(count) >= 60
    assert first == second
    assert float(spent) < MOST


def test_defaults_of_keyword_only_parameters_count():
    """Code that differs in nothing else: what is known of one does not hold for the other."""

    def by(factor):
        def scaled(x, *, scale=factor):
            return x.exp() * scale

        def pattern(x):
            return scaled(x)

        return define(pattern)

    assert source_of(by(2)) == source_of(by(2)) != source_of(by(3))


def test_a_function_that_is_a_default_counts_by_its_code():
    def by(act):
        def gated(x, act=act):
            return act(x) * x

        def pattern(x):
            return gated(x)

        return source_of(define(pattern))

    assert by(lambda x: x.exp()) == by(lambda x: x.exp()) != by(lambda x: x.sin())
