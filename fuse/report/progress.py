"""Name a long-running stage on stderr, once it has taken a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 1.0


@contextmanager
def stage(doing: str, quiet: bool = False, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Print ``fuse: <doing> ...`` to stderr if the block takes longer than ``patience`` seconds.

    >>> with stage("capturing"):
    ...     pass
    """
    stream = sys.stderr
    timer = threading.Timer(patience, lambda: print(f"fuse: {doing} ...", file=stream, flush=True))
    timer.daemon = True
    if not quiet:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
