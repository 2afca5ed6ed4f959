"""A source gets the definitions of the prelude that it uses, and those that they use."""

from __future__ import annotations

import re

import pytest

from fuse.kernel.cpu.prelude import prelude, prelude_of

FUNCTION = re.compile(r"^(?!//|#)\S.*?\b(fuse_\w+)\(.*", re.MULTILINE)
FUNCTIONS = sorted({found[1] for found in FUNCTION.finditer(prelude())})


def test_a_source_gets_every_overload_of_what_it_uses() -> None:
    assert len(FUNCTIONS) > 100
    for name in FUNCTIONS:
        found = [
            [line[0] for line in FUNCTION.finditer(text) if line[1] == name] for text in (prelude(), prelude_of(name))
        ]
        assert found[0] == found[1], name


def test_what_a_source_gets_uses_nothing_else() -> None:
    for name in FUNCTIONS:
        kept = prelude_of(name)
        assert prelude_of(re.sub("//.*", "", kept)) == kept, name


@pytest.mark.parametrize(("code", "expected"), [("", 0), ("int fuse(int x) { return x; }", 0), ("fuse_abs(x)", 7)])
def test_a_source_gets_little_else(code: str, expected: int) -> None:
    assert len(FUNCTION.findall(prelude_of(code))) == expected
