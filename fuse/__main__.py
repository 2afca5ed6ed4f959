"""``python -m fuse``: the command ``fuse``, also where another package's command of that name comes first."""

from __future__ import annotations

import shutil
import sys

from fuse.cli import main


def foreign_command() -> str | None:
    """The program that a shell runs for ``fuse``, where it is another's."""
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
