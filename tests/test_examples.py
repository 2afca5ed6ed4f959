"""The patterns that the documents show are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuse.check.pattern import verify
from fuse.rewrite.patterns import registry

FILES = sorted((Path(__file__).parent.parent / "docs" / "examples").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_pattern_of_the_documents_is_right_on_all_that_is_tried(file):
    found = verify(registry.load(file))
    assert found.passed, str(found)
    assert found.fired > 20
