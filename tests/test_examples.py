"""The patterns that the documents show are right.

What a transcript of ``fuse check-pattern`` tries is held by the test of transcripts, and not tried here once more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fuse.check.pattern import verify
from fuse.rewrite.patterns import registry

DOCS = Path(__file__).parent.parent / "docs"
SHOWN = "".join(page.read_text() for page in DOCS.glob("*.md"))
FILES = sorted(
    file
    for file in DOCS.glob("examples/*.py")
    if f"$ fuse check-pattern {file.relative_to(DOCS.parent).as_posix()}\n" not in SHOWN
)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_pattern_of_the_documents_is_right_on_all_that_is_tried(file):
    found = verify(registry.load(file))
    assert found.passed, str(found)
    assert found.fired > 20
