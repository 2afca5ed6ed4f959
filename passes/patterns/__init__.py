"""The patterns that come with fuse, one a file; importing this package registers them.

What the generic passes make one kernel of by themselves needs no pattern: docs/patterns/README.md has the list, and
tests/passes/patterns/test_without_patterns.py holds them to it.
"""

from fuse.passes.patterns import cross_entropy as cross_entropy
from fuse.passes.patterns import nearest_upsample as nearest_upsample
from fuse.passes.patterns import repeated_embedding as repeated_embedding
