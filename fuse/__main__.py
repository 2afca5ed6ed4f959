"""``python -m fuse``: run this package even where another package's command ``fuse`` comes first in the path."""

from __future__ import annotations

import shutil
import sys

from fuse.cli import main


def foreign_command() -> str | None:
    """The path of another package's command ``fuse``, if a shell would run that one."""
    found = shutil.which("fuse")
    if found is None:
        return None
    with open(found, "rb") as program:
        start = program.read(2000)
    return None if b"torch_fuse" in start or b"fuse.cli" in start else found


if __name__ == "__main__":
    if (other := foreign_command()) is not None:
        print(f"fuse: warning: the command {other} is another program; python -m fuse is this one", file=sys.stderr)
    main()
